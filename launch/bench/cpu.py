"""Decode speed on the CPU against ``transformers.generate``, one rank, equal dtype and threads.

    python launch/bench/cpu.py [--model DIR] [--rounds 3]

Three workloads, greedy, end-of-sequence ignored: one prompt; 16 prompts with equal lengths; a
stream of prompts with output lengths of 8 to 128, 16 at a time. transformers runs the last one in
batches of 16, each until its longest output is done; the engine refills. Tokens/s count the tokens
asked for. Rounds alternate between the two, medians are compared.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "0")
sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch  # noqa: E402 (after the environment and the path)

from launch.bench.environment import print_json  # noqa: E402
from launch.demo.model import ensure_model  # noqa: E402
from tp_engine import LLM, SamplingParams  # noqa: E402

PROMPT_TOKENS = 32
CONCURRENT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Prompts of equal length with the number of tokens to generate for each."""

    name: str
    prompts: list[list[int]]
    lengths: list[int]


def workloads(vocab: int) -> list[Workload]:
    """The three workloads; the same every time."""
    rng = random.Random(0)

    def prompts(count: int) -> list[list[int]]:
        return [[rng.randrange(100, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(count)]

    return [
        Workload(name="batch 1", prompts=prompts(1), lengths=[64]),
        Workload(name="batch 16", prompts=prompts(CONCURRENT), lengths=[64] * CONCURRENT),
        Workload(
            name="16 at a time, 8 to 128 tokens",
            prompts=prompts(3 * CONCURRENT),
            lengths=[rng.randint(8, 128) for _ in range(3 * CONCURRENT)],
        ),
    ]


def run_engine(llm: LLM, work: Workload) -> list[list[int]]:
    """The engine's output tokens."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        for length in work.lengths
    ]
    answers = llm.generate(work.prompts, params)
    assert answers is not None
    return [answer.tokens for answer in answers]


def run_transformers(model: Any, work: Workload) -> list[list[int]]:
    """The output tokens of transformers, in batches of at most `CONCURRENT`."""
    outputs: list[list[int]] = []
    for start in range(0, len(work.prompts), CONCURRENT):
        prompts = torch.tensor(work.prompts[start : start + CONCURRENT])
        lengths = work.lengths[start : start + CONCURRENT]
        with torch.inference_mode():
            tokens = model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=max(lengths),
                do_sample=False,
                pad_token_id=0,
            )
        rows = tokens[:, prompts.shape[1] :].tolist()
        outputs += [row[:length] for row, length in zip(rows, lengths, strict=True)]
    return outputs


def equal_prefix(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of the tokens that are equal before an output's first difference."""
    equal = total = 0
    for mine, other in zip(ours, theirs, strict=True):
        total += len(other)
        for a, b in zip(mine, other, strict=True):
            if a != b:
                break
            equal += 1
    return equal / total


def measure(llm: LLM, model: Any, work: Workload, rounds: int) -> dict[str, Any]:
    """Check, then time both in turns.

    Raises:
        SystemExit: outputs differ by more than near-ties can explain; no speed is printed.
    """
    same = equal_prefix(run_engine(llm, work), run_transformers(model, work))
    if same < 0.9:
        raise SystemExit(f"{work.name}: only {same:.1%} of the tokens agree with transformers")
    seconds: dict[str, list[float]] = {"engine": [], "transformers": []}
    for _ in range(rounds):
        start = time.perf_counter()
        run_engine(llm, work)
        middle = time.perf_counter()
        run_transformers(model, work)
        seconds["engine"].append(middle - start)
        seconds["transformers"].append(time.perf_counter() - middle)
    ours, theirs = (sum(work.lengths) / statistics.median(s) for s in seconds.values())
    return {
        "engine_tokens_per_s": round(ours, 1),
        "transformers_tokens_per_s": round(theirs, 1),
        "ratio": round(ours / theirs, 3),
        "equal_tokens": round(same, 4),
    }


def main() -> None:
    """Run the workloads and print a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="default: the demo model in full precision")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of which the median is taken (%(default)s)"
    )
    arguments = parser.parse_args()
    directory = arguments.model or ensure_model()
    from transformers import AutoModelForCausalLM

    llm = LLM(
        str(directory),
        device="cpu",
        dtype="float32",
        max_num_seqs=CONCURRENT,
        enable_prefix_caching=False,
    )
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # else it ends there, whatever generate is told
    results = {}
    for work in workloads(llm.rank.dims.vocab):
        results[work.name] = measure(llm, model, work, arguments.rounds)
        print(f"{work.name:32}{results[work.name]}", file=sys.stderr)
    llm.close()
    print_json("cpu", {"dtype": "float32", "ranks": 1, "workloads": results})


if __name__ == "__main__":
    main()
