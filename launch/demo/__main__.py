"""The demo: serve a small real model with three adapters, and ask all of them one question.

The model is made if need be. The question goes to the base and to all adapters in one batch, and
the answers are judged. With `--once` the server is stopped again, and the exit code is 0 when all
answers were right, else 1; without, it keeps serving until Ctrl-C.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from launch.demo.batch import ask_all
from launch.demo.data import DEFAULT_QUESTION
from launch.demo.model import HUB_NAME, ensure_nf4_model
from launch.demo.rules import STYLES
from launch.demo.service import Service, ServiceError, choose_port, default_ranks, serve_command
from launch.demo.table import render
from launch.demo.verdict import problem_of

ADAPTERS = Path(__file__).resolve().parent / "adapters"
BASE = "smollm2"


def positive(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 on")
    return int(text)


def tcp_port(text: str) -> int:
    """An argparse type: what a server can listen on."""
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to 65535")
    return int(text)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line; `ranks` and `port` are None unless given."""
    parser = argparse.ArgumentParser(prog="python -m launch.demo", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=positive, metavar="N", help="processes; default: the GPUs, else 2")
    add("--question", default=DEFAULT_QUESTION, metavar="TEXT", help="what to ask")
    add("--port", type=tcp_port, metavar="PORT", help="default: 8000, or a free one")
    add("--once", action="store_true", help="stop after the batch")
    return parser.parse_args(arguments)


def ask_and_judge(service: Service, question: str) -> bool:
    """Send the batch, print the table, and say whether every answer is right."""
    print(f"\n[demo] one batch, {1 + len(STYLES)} models: {question}\n", flush=True)
    answers = ask_all(service.url, [BASE, *STYLES], question)
    problems = [problem_of(answer, question) for answer in answers]
    width = max(80, shutil.get_terminal_size((120, 24)).columns)
    print(render(answers, problems, width) + "\n", flush=True)
    return not any(problems)


def keep_serving(service: Service, question: str) -> None:
    """Show how to ask on, and wait for Ctrl-C."""
    body = {"model": "pirate", "messages": [{"role": "user", "content": question}]}
    data = json.dumps(body | {"max_tokens": 64}).replace("'", "'\\''")
    print(f"[demo] serving at {service.url}; Ctrl-C stops it. Try:\n")
    print(f"curl -s {service.url}/v1/chat/completions \\")
    print(f"  -H 'content-type: application/json' -d '{data}'\n", flush=True)
    try:
        service.wait()
    except KeyboardInterrupt:
        print("\n[demo] stopping", flush=True)


def run(options: argparse.Namespace) -> bool:
    """Do it all; true when every answer was right."""
    ranks = options.ranks or default_ranks()
    port = choose_port(options.port)
    model = ensure_nf4_model()
    adapters = {style: ADAPTERS / style for style in STYLES}
    print(f"[demo] starting the server: {ranks} ranks, port {port}", flush=True)
    command = serve_command(
        model=model, names=[BASE, HUB_NAME], adapters=adapters, ranks=ranks, port=port
    )
    with Service(command, port) as service:
        service.wait_ready()
        good = ask_and_judge(service, options.question)
        if not options.once:
            keep_serving(service, options.question)
    return good


def main() -> int:
    """Exit code: 0 when every answer was right, 1 when not or when the server failed."""
    options = parse()
    # A terminated demo stops its server as an interrupted one does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        good = run(options)
    except (ServiceError, TimeoutError, ValueError, subprocess.SubprocessError) as error:
        print(f"[demo] failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("[demo] interrupted", file=sys.stderr)
        return 130
    print("[demo] every answer is as it should be" if good else "[demo] some answers are wrong")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
