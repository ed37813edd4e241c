"""Decode steps and prefill of the offline engine at the shapes of a large model.

    python launch/bench/engine.py [--quantize nf4] [--decode 1x0,256x64] [--profile sums]
    torchrun --nproc-per-node N launch/bench/engine.py ...

Random weights, one LoRA rank on all seven linears, prompts of 128 tokens. A case of ``--decode`` is
``BATCHxADAPTERS``; its step is the median wall time between steps while all requests decode,
planning and sampling included. Cases without adapters are measured before any is registered, too.
Prefill counts the prompt tokens of 32 prompts of 2048. ``--profile sums`` adds the time of each
kernel in the first of these steps, and its share of the time that the same steps take unprofiled;
``--profile range`` marks a few steps of each case for ``ncu --profile-from-start off
--graph-profiling node``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")
sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch  # noqa: E402 (after the environment and the path)

from launch.bench.environment import print_json  # noqa: E402
from launch.bench.shapes import (  # noqa: E402
    SHAPES,
    random_revision,
    register_copies,
    write_config,
)
from launch.bench.step_profile import mark_steps, profile_steps, table  # noqa: E402
from tp_engine import LLM, SamplingParams  # noqa: E402
from tp_engine.engine import Engine  # noqa: E402
from tp_engine.messages import Submit  # noqa: E402
from tp_engine.steps.warm_up import warm_up  # noqa: E402

PROMPT_TOKENS = 128
WARM_STEPS = 8
PROFILED_STEPS = 16
MARKED_STEPS = 2
CASES = "1x0,1x1,32x0,32x1,32x32,64x0,64x32,128x0,128x1,128x64,256x0,256x1,256x64"


def submit(engine: Engine, count: int, length: int, tokens: int, digests: list[str]) -> None:
    """Queue requests with prompts of their own, over the adapters in turn ("" is the base)."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for i in range(count):
        prompt = [(i * 7919 + j * 31) % 900 + 50 for j in range(length)]
        message = Submit(request_id=str(i), model="", prompt=prompt, params=params, salt=str(i))
        engine.submit(message, digests[i % len(digests)])


def start_decoding(engine: Engine, batch: int, digests: list[str], steps: int) -> None:
    """Bring ``batch`` requests so far that at least ``steps`` steps decode all of them."""
    submit(engine, batch, PROMPT_TOKENS, steps + 2 * WARM_STEPS + 64, digests)
    while len(engine.scheduler.running) < batch or any(
        request.output_len < WARM_STEPS for request in engine.scheduler.running
    ):
        engine.step()
    _settle()


def abort_all(engine: Engine) -> None:
    """End every request, and the step that is under way."""
    for request_id in list(engine.requests):
        engine.abort(request_id)
    engine.step()


def decode_ms(engine: Engine, batch: int, digests: list[str], steps: int) -> float:
    """Milliseconds between decode steps of ``batch`` requests, the median of ``steps``."""
    start_decoding(engine, batch, digests, steps)
    ends = [time.perf_counter()]
    for _ in range(steps):
        engine.step()
        ends.append(time.perf_counter())
    abort_all(engine)
    return 1000 * statistics.median(b - a for a, b in pairwise(ends))


def prefill_tokens_per_s(engine: Engine, digests: list[str], count: int, length: int) -> float:
    """Prompt tokens a second over ``count`` prompts."""
    submit(engine, count, length, 1, digests)
    _settle()
    start = time.perf_counter()
    while engine.requests:
        engine.step()
    _settle()
    return count * length / (time.perf_counter() - start)


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_decode(
    engine: Engine, case: tuple[int, int], adapters: list[str], arguments: argparse.Namespace
) -> dict[str, Any]:
    """One decode case: its step in milliseconds, and with ``--profile sums`` the kernels' share."""
    batch, count = case
    digests = adapters[:count] or [""]
    step_ms = decode_ms(engine, batch, digests, arguments.steps)
    print(f"batch {batch}, {count} adapters{step_ms:12.3f} ms", file=sys.stderr)
    results: dict[str, Any] = {
        "ms": round(step_ms, 3),
        "tokens_per_s": round(1000 * batch / step_ms),
    }
    if arguments.profile is not None:
        same_ms = decode_ms(engine, batch, digests, PROFILED_STEPS)
        start_decoding(engine, batch, digests, PROFILED_STEPS)
        if arguments.profile == "range":
            mark_steps(engine.step, MARKED_STEPS)
        else:
            found = profile_steps(engine.step, PROFILED_STEPS)
            print(table(found, same_ms), file=sys.stderr)
            results["kernel_ms"] = round(found.kernel_sum, 3)
            results["kernel_share"] = round(found.kernel_sum / same_ms, 3)
        abort_all(engine)
    return results


def measure(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """All cases of the command line."""
    engine = llm.engine
    assert engine is not None
    revision = random_revision(llm.rank.dims, arguments.lora_rank, seed=0)
    wanted = [count for _, count in arguments.decode] + arguments.prefill_adapters
    start = time.perf_counter()
    warm_up(engine, gpu=llm.rank.comm.device.type == "cuda")
    results: dict[str, Any] = {"warm_up_s": round(time.perf_counter() - start, 1)}
    if max(wanted, default=0):
        results["ms_without_adapters"] = {
            f"{batch}x0": round(decode_ms(engine, batch, [""], arguments.steps), 3)
            for batch, count in arguments.decode
            if count == 0
        }
    adapters = register_copies(llm.rank, engine, revision, max(wanted, default=0))
    start = time.perf_counter()
    warm_up(engine, gpu=llm.rank.comm.device.type == "cuda")
    results["warm_up_with_adapters_s"] = round(time.perf_counter() - start, 1)
    results["decode"] = {
        f"{case[0]}x{case[1]}": measure_decode(engine, case, adapters, arguments)
        for case in arguments.decode
    }
    results["prefill_tokens_per_s"] = {}
    for count in arguments.prefill_adapters:
        digests = adapters[:count] or [""]
        speed = prefill_tokens_per_s(engine, digests, arguments.prompts, arguments.prompt_length)
        results["prefill_tokens_per_s"][f"{count} adapters"] = round(speed)
        print(f"prefill, {count} adapters{speed:15.0f} tokens/s", file=sys.stderr)
    return results


def decode_cases(text: str) -> list[tuple[int, int]]:
    """Batch and number of adapters of cases such as ``1x0,256x64``.

    Raises:
        argparse.ArgumentTypeError: one isn't of that form, or has more adapters than requests.
    """
    cases = []
    for case in filter(None, text.split(",")):
        batch, cross, count = case.partition("x")
        if not (cross and batch.isdecimal() and count.isdecimal() and int(count) <= int(batch)):
            raise argparse.ArgumentTypeError(
                f"{case!r} is not allowed: BATCHxADAPTERS, with at most BATCH adapters"
            )
        cases.append((int(batch), int(count)))
    return cases


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes",
        choices=sorted(SHAPES),
        default="llama-3.1-8b",
        help="of which model (%(default)s)",
    )
    parser.add_argument("--quantize", choices=["nf4"], help="quantise the base")
    parser.add_argument("--dtype", default="bfloat16", help="of activations (%(default)s)")
    parser.add_argument("--lora-rank", type=int, default=16, help="of every adapter (%(default)s)")
    parser.add_argument(
        "--decode",
        type=decode_cases,
        default=CASES,
        metavar="CASE,CASE",
        help="requests x adapters, as 1x0,256x64",
    )
    parser.add_argument("--steps", type=int, default=64, help="decode steps a case (%(default)s)")
    parser.add_argument("--prompts", type=int, default=32, help="of the prefill (%(default)s)")
    parser.add_argument(
        "--prompt-length", type=int, default=2048, help="tokens of each of them (%(default)s)"
    )
    parser.add_argument(
        "--prefill-adapters",
        type=int,
        nargs="*",
        default=[0, 32],
        help="how many the prompts are spread over, a figure each (0 32)",
    )
    parser.add_argument("--enforce-eager", action="store_true", help="capture no steps")
    parser.add_argument(
        "--profile",
        choices=["sums", "range"],
        help="sums: time of each kernel; range: marks for ncu",
    )
    return parser.parse_args(argv)


def main() -> None:
    """Build the engine, measure, print a table and the JSON line."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as directory:
        llm = LLM(
            str(write_config(Path(directory), arguments.shapes)),
            load_format="dummy",
            quantize=arguments.quantize,
            dtype=arguments.dtype,
            max_model_len=4096,
            max_num_seqs=max((batch for batch, _ in arguments.decode), default=arguments.prompts),
            enable_prefix_caching=False,
            enforce_eager=arguments.enforce_eager,
        )
        if llm.engine is None:
            llm.close()  # serves rank 0 until it has measured
            return
        results = measure(llm, arguments)
        llm.close()
    kept = ("shapes", "quantize", "dtype", "lora_rank", "enforce_eager")
    print_json("engine", {**{name: getattr(arguments, name) for name in kept}, **results})


if __name__ == "__main__":
    main()
