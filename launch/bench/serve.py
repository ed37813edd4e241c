"""HTTP load: tokens/s and delays of a server under Poisson, Gamma or closed-loop arrivals.

    python launch/bench/serve.py --url http://127.0.0.1:8000 --models base pirate --rate 4 --cv 2
    python launch/bench/serve.py --start --adapters 32 --streams 64 --offline -- --quantize nf4

``--url`` measures a server that runs. ``--start`` starts one of random weights at ``--shapes``,
with adapters made here; what follows ``--`` are options of ``launch/serve.py``. ``--offline`` then
gives the same requests to the engine in this process and prints the ratio.

Without ``--rate`` the loop is closed: ``--streams`` requests are open at any time. Answers are
streamed, greedy and of a length decided beforehand. A status other than 200, a wrong number of
tokens, or a sampled answer that isn't the one that its request gets alone (but for near-ties)
prints no figures and ends with exit code 1. The last line is JSON.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("GOMP_SPINCOUNT", "0")
sys.path[0] = str(Path(__file__).resolve().parents[2])

from launch.bench.environment import print_json  # noqa: E402 (after the path)
from launch.bench.load.client import Seen, Target, run_clients  # noqa: E402
from launch.bench.load.figures import by_tenant, faults, figures  # noqa: E402
from launch.bench.load.solo import NEAR_TIE, ask_alone, disagreements, sample  # noqa: E402
from launch.bench.load.workload import POPULARITIES, Request, Workload  # noqa: E402

SAMPLE_TOKENS = 32
WARM_TOKENS = 4
BUSY_CLIENT = 0.7


class RedCheck(RuntimeError):
    """The server answers wrongly; there are no figures."""


def span(text: str) -> tuple[int, int]:
    """``128`` or ``8,512``: least and most."""
    low, _, high = text.partition(",")
    return int(low), int(high or low)


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and the options for ``launch/serve.py``."""
    given = list(sys.argv[1:] if argv is None else argv)
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="of a running server")
    where.add_argument("--start", action="store_true", help="start one with random weights")
    parser.add_argument("--shapes", default="llama-3.1-8b")
    parser.add_argument("--adapters", type=int, default=0, help="to make, with --start")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=1, help="of the server, with --start")
    parser.add_argument("--offline", action="store_true", help="compare with the offline engine")
    parser.add_argument("--models", nargs="+", default=["base"], help="to choose from, with --url")
    parser.add_argument("--key-file", type=Path, help="a tenant's API key a line, with --url")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--streams", type=int, default=64, help="open at a time without --rate")
    parser.add_argument("--rate", type=float, help="requests a second")
    parser.add_argument("--cv", type=float, default=1.0, help="of the gaps; 1 is Poisson")
    parser.add_argument("--popularity", choices=POPULARITIES, default="turns")
    parser.add_argument("--alpha", type=float, default=0.3, help="of the power law")
    parser.add_argument("--prompt-tokens", type=span, default=(128, 128), metavar="LOW,HIGH")
    parser.add_argument("--output-tokens", type=span, default=(128, 384), metavar="LOW,HIGH")
    parser.add_argument("--vocab", type=int, default=1000, help="prompt tokens are below it")
    parser.add_argument("--tenants", type=int, default=1, help="API keys to make, with --start")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4, help="client processes")
    parser.add_argument("--samples", type=int, default=4, help="requests compared with themselves")
    parser.add_argument("--near-tie", type=float, default=NEAR_TIE)
    arguments = parser.parse_args(given[:at])
    if arguments.offline and (arguments.url or arguments.rate is not None or arguments.ranks > 1):
        parser.error("--offline needs --start, one rank and a closed loop")
    return arguments, given[at + 1 :]


def workload(arguments: argparse.Namespace, models: tuple[str, ...], tenants: int) -> Workload:
    """What the command line asks for."""
    return Workload(
        requests=arguments.requests,
        models=models,
        popularity=arguments.popularity,
        alpha=arguments.alpha,
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        vocab=arguments.vocab,
        tenants=tenants,
        rate=arguments.rate,
        cv=arguments.cv,
        seed=arguments.seed,
    )


def warm_requests(requests: Sequence[Request], streams: int) -> list[Request]:
    """A short form of the first requests, all due at once; the seed of their prompts differs."""
    return [
        replace(request, at=0.0, tokens=WARM_TOKENS, prompt=request.prompt[::-1])
        for request in requests[: 2 * streams]
    ]


def measure(
    arguments: argparse.Namespace, requests: Sequence[Request], target: Target
) -> dict[str, Any]:
    """Figures of one run.

    Raises:
        RedCheck: an answer is wrong.
    """
    samples = sample(requests, arguments.samples, SAMPLE_TOKENS)
    alone = [(request, ask_alone(request, target)) for request in samples]
    warm = warm_requests(requests, arguments.streams)
    run_clients(warm, target, streams=arguments.streams, processes=arguments.clients)
    streams = arguments.streams if arguments.rate is None else None
    seen: Seen = run_clients(requests, target, streams=streams, processes=arguments.clients)
    wrong = faults(requests, seen.answers)
    if not wrong:
        wrong = disagreements(alone, seen.answers, arguments.near_tie)
    if wrong:
        raise RedCheck("\n".join([f"{len(wrong)} faults, so no figures:", *wrong[:10]]))
    if seen.busy > BUSY_CLIENT:
        print(f"a client used {seen.busy:.0%} of its core: give more --clients", file=sys.stderr)
    results = {"client_busy": round(seen.busy, 3), **figures(seen.answers)}
    if max(request.tenant for request in requests):
        results["tenants"] = by_tenant(requests, seen.answers)
    return results


def measure_running(arguments: argparse.Namespace) -> dict[str, Any]:
    """Figures of the server at ``--url``."""
    url = urlsplit(arguments.url)
    keys = tuple(arguments.key_file.read_text().split()) if arguments.key_file else ()
    target = Target(host=url.hostname or "127.0.0.1", port=url.port or 80, keys=keys)
    requests = workload(arguments, tuple(arguments.models), max(1, len(keys))).draw()
    return measure(arguments, requests, target)


def measure_started(arguments: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    """Figures of a server that is started here, and of the offline engine if asked for."""
    from launch.bench.load.offline import offline_figures
    from launch.bench.load.server import BASE, make_model, started

    with tempfile.TemporaryDirectory() as name:
        made = make_model(
            Path(name), arguments.shapes, arguments.adapters, arguments.lora_rank, arguments.tenants
        )
        models = tuple(made.adapters) or (BASE,)
        requests = workload(arguments, models, arguments.tenants).draw()
        with started(made, arguments.ranks, options) as target:
            results = measure(arguments, requests, target)
        if arguments.offline:
            runs = [warm_requests(requests, arguments.streams), requests]
            results["offline"] = offline_figures(made, options, runs, arguments.streams)
            ratio = results["tokens_per_s"] / results["offline"]["tokens_per_s"]
            results["of_offline"] = round(ratio, 3)
    return results


def table(results: dict[str, Any]) -> str:
    """The main figures, for people."""
    lines = [
        f"{results['tokens_per_s']:.0f} tokens/s, {results['requests_per_s']:.2f} requests/s, "
        f"{results['tokens']} tokens in {results['seconds']:.1f} s"
    ]
    if "offline" in results:
        offline = results["offline"]["tokens_per_s"]
        lines.append(f"{results['of_offline']:.3f} of the offline engine's {offline:.0f} tokens/s")
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        lines.append(f"  {name:8}" + "".join(f"  {k} {v:.2f}" for k, v in results[name].items()))
    for tenant, found in results.get("tenants", {}).items():
        lines.append(f"  {tenant}: {found['tokens_per_s']:.0f} tokens/s, ttft {found['ttft_ms']}")
    return "\n".join(lines)


def main() -> int:
    """Measure and print; the exit code."""
    arguments, options = parse()
    try:
        if arguments.url:
            results = measure_running(arguments)
        else:
            results = measure_started(arguments, options)
    except RedCheck as error:
        print(error, file=sys.stderr)
        return 1
    print(table(results), file=sys.stderr)
    kept = ["shapes", "adapters", "lora_rank", "ranks", "streams", "rate", "cv", "popularity"]
    kept += ["alpha", "prompt_tokens", "output_tokens", "url"]
    settings = {name: getattr(arguments, name) for name in kept}
    print_json("serve", {**settings, "options": options, **results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
