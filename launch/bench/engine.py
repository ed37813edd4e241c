"""Decode steps and prefill of the offline engine at the shapes of a large model.

    python launch/bench/engine.py [--shapes llama-3.1-8b] [--quantize nf4] [--lora-rank 16]

Random weights, one LoRA rank on all seven linears, prompts of 128 tokens. A decode step is the
wall time between steps while all requests decode, planning and sampling included; prefill counts
the prompt tokens of 32 prompts of 2048.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
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
from tp_engine import LLM, SamplingParams  # noqa: E402
from tp_engine.engine import Engine  # noqa: E402
from tp_engine.messages import Submit  # noqa: E402

PROMPT_TOKENS = 128
WARM_STEPS = 8


def submit(engine: Engine, count: int, length: int, tokens: int, digests: list[str]) -> None:
    """Queue requests with prompts of their own, over the adapters in turn ("" is the base)."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for i in range(count):
        prompt = [(i * 7919 + j * 31) % 900 + 50 for j in range(length)]
        message = Submit(request_id=str(i), model="", prompt=prompt, params=params, salt=str(i))
        engine.submit(message, digests[i % len(digests)])


def decode_ms(engine: Engine, batch: int, digests: list[str], steps: int) -> float:
    """Milliseconds between decode steps of ``batch`` requests."""
    submit(engine, batch, PROMPT_TOKENS, steps + 2 * WARM_STEPS + 64, digests)
    while len(engine.scheduler.running) < batch or any(
        request.output_len < WARM_STEPS for request in engine.scheduler.running
    ):
        engine.step()
    start = time.perf_counter()
    for _ in range(steps):
        engine.step()
    _settle()
    elapsed = time.perf_counter() - start
    for request_id in list(engine.requests):
        engine.abort(request_id)
    engine.step()
    return 1000 * elapsed / steps


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


def measure(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """All cases of the command line."""
    engine = llm.engine
    assert engine is not None
    revision = random_revision(llm.rank.dims, arguments.lora_rank, seed=0)
    adapters = register_copies(llm.rank, engine, revision, max(arguments.adapters))
    engine.warm_up()
    results: dict[str, Any] = {"decode_ms": {}, "prefill_tokens_per_s": {}}
    for batch in arguments.batch:
        for count in arguments.adapters:
            if count > batch:
                continue
            digests = adapters[:count] or [""]
            name = f"batch {batch}, {count} adapters"
            results["decode_ms"][name] = round(
                decode_ms(engine, batch, digests, arguments.steps), 3
            )
            print(f"{name:28}{results['decode_ms'][name]:9.3f} ms", file=sys.stderr)
    for count in arguments.prefill_adapters:
        digests = adapters[:count] or [""]
        speed = prefill_tokens_per_s(engine, digests, arguments.prompts, arguments.prompt_length)
        results["prefill_tokens_per_s"][f"{count} adapters"] = round(speed)
        print(f"prefill, {count} adapters{speed:15.0f} tokens/s", file=sys.stderr)
    return results


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--quantize", choices=["nf4"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 32, 64])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-length", type=int, default=2048)
    parser.add_argument("--prefill-adapters", type=int, nargs="*", default=[0, 32])
    parser.add_argument("--enforce-eager", action="store_true")
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
            max_num_seqs=max(arguments.batch),
            enable_prefix_caching=False,
            enforce_eager=arguments.enforce_eager,
        )
        results = measure(llm, arguments)
        llm.close()
    kept = ("shapes", "quantize", "dtype", "lora_rank", "enforce_eager")
    print_json("engine", {**{name: getattr(arguments, name) for name in kept}, **results})


if __name__ == "__main__":
    main()
