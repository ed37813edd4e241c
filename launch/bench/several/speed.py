"""Decode steps and prefill of the offline engine on some ranks, case by case.

    torchrun --nproc-per-node N -m launch.bench.several.speed --shapes llama-3.1-8b \
        --quantize nf4 --decode 1x0,32x32 --prefill 32

Set-up as in ``launch/bench/engine.py``, but decode steps are captured when a case first needs
them, so that a few cases take seconds. With ``--no-sums`` each rank goes on with its own part: the
tokens are wrong, and what the step is shorter by is what the sums take.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kernels.reduce import Mailboxes
from launch.bench.engine import decode_cases, decode_ms, prefill_tokens_per_s
from launch.bench.shapes import SHAPES, random_revision, register_copies, write_config
from tp_engine import LLM
from tp_engine.ranks.comm import Comm

LORA_RANK = 16
WARM_STEPS = 24


def main() -> None:
    """Measure; rank 0 prints one JSON line."""
    given = _parse()
    began = time.perf_counter()
    if given.no_sums:
        leave_out_sums()
    most = max((count for _, count in given.decode), default=0)
    with tempfile.TemporaryDirectory() as directory:
        llm = LLM(
            str(write_config(Path(directory), given.shapes)),
            load_format="dummy",
            quantize=given.quantize,
            dtype=given.dtype,
            max_model_len=given.max_model_len,
            max_num_seqs=max([batch for batch, _ in given.decode] + [32]),
            enable_prefix_caching=False,
        )
        if llm.engine is not None:
            results = _measure(llm, given, max([most, *given.prefill]))
            results["seconds"] = round(time.perf_counter() - began, 1)
            print(json.dumps(results), flush=True)
        llm.close()


def leave_out_sums() -> None:
    """For the rest of this process."""
    Mailboxes.hold_rows = lambda self, x: False  # type: ignore[method-assign]
    Comm.all_reduce = lambda self, x: x  # type: ignore[method-assign]


def _measure(llm: LLM, given: argparse.Namespace, adapters: int) -> dict[str, Any]:
    engine = llm.engine
    assert engine is not None
    digests: list[str] = []
    if adapters:
        revision = random_revision(llm.rank.dims, LORA_RANK, seed=0)
        digests = register_copies(llm.rank, engine, revision, adapters)
    results: dict[str, Any] = {"ranks": llm.rank.comm.world, "decode_ms": {}, "prefill": {}}
    for batch, count in given.decode:
        chosen = digests[:count] or [""]
        decode_ms(engine, batch, chosen, WARM_STEPS)  # compiles and captures
        took = decode_ms(engine, batch, chosen, given.steps)
        results["decode_ms"][f"{batch}x{count}"] = round(took, 3)
        print(f"decode {batch}x{count}: {took:.3f} ms", file=sys.stderr, flush=True)
    for count in given.prefill:
        chosen = digests[:count] or [""]
        speeds = [
            prefill_tokens_per_s(engine, chosen, given.prompts, given.prompt_length)
            for _ in range(2)
        ]
        results["prefill"][str(count)] = round(speeds[-1])
        print(f"prefill {count}: {speeds[-1]:.0f} tokens/s", file=sys.stderr, flush=True)
    return results


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--quantize", choices=["nf4"])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--decode", type=decode_cases, default="1x0", metavar="CASE,CASE")
    parser.add_argument("--prefill", type=int, nargs="*", default=[], metavar="ADAPTERS")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-length", type=int, default=2048)
    parser.add_argument("--no-sums", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
