"""LoRA kernels on one GPU: Llama-3.1-8B's four projections, bfloat16, all seven sites.

    python launch/bench/kernels_lora.py [--seconds 300] [--layers 32] [--base bf16 nf4]

Each case is first compared with the reference. A layer is the projections qkv, o, gate_up and down,
each a launch (steps of few rows, with room for as many tiles as rows, as in a captured step) or a
shrink and an expand launch (many rows). Times are medians of CUDA graph replays, in microseconds:

    cold        L2 is emptied before every layer, the time of which is taken off
    turning     the layers one after the other, each with rank-rows of its own
    best        cold, with the best tile sizes that were tried for each projection
    no_overlap  cold, without programmatic dependent launch
    bf16, nf4   what adapters add to a whole layer with such weights, deltas made beside the base
                products (see `lora_layers`): what a decode step pays

The best plans that were tried are printed before the table: microseconds of a projection. Exit code
1 when a case failed or gave a wrong result.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch  # noqa: E402 (after the path)

from kernels.lora import launches  # noqa: E402
from kernels.lora.plans import MANY_ROWS  # noqa: E402
from launch.bench.environment import print_json  # noqa: E402
from launch.bench.graphs import read_ceiling  # noqa: E402
from launch.bench.lora_arena import MODULES, Adapters, deal, make_adapters, zipf  # noqa: E402
from launch.bench.lora_layers import Layers  # noqa: E402
from launch.bench.lora_plans import add_plans, expand_plans, shrink_plans  # noqa: E402
from launch.bench.lora_step import (  # noqa: E402
    CHOSEN,
    Bench,
    Case,
    Pair,
    Plans,
    Step,
)

MARGIN = 2e-2  # of the largest value: two roundings to bfloat16 and its products
CEILING = 4.3e12  # bytes/s, an H200's large sum
TRIED_SHOWN = 3


def cases(layers: int, device: torch.device) -> list[Case]:
    """What is timed, with the figure that each should stay under."""
    even = make_adapters([16] * 64, layers, device)
    few_layers = max(1, layers // 8)
    mixed = make_adapters([8, 16, 32, 64] * 16, few_layers, device)
    same = make_adapters([30] * 64, few_layers, device)
    alone: tuple[list[int], list[int | None]] = ([63, 1], [None, None])
    chunk: tuple[list[int], list[int | None]] = ([2048] + [1] * 63, list(range(64)))
    table: list[tuple[str, Adapters, tuple[list[int], list[int | None]], float | None]] = [
        ("1 row, 1", even, deal(1, 1), 10.0),
        ("64 rows, 1", even, deal(64, 1), 25.0),
        ("64 rows, 8", even, deal(64, 8), 32.0),
        ("64 rows, 64", even, deal(64, 64), 75.0),
        ("32 rows, 32", even, deal(32, 32), 45.0),
        ("256 rows, 64", even, deal(256, 64), 80.0),
        ("64 rows, zipf 16", even, zipf(64, 16), None),
        ("64 rows, 32 of them base, 32", even, deal(64, 32, base=32), None),
        ("64 rows, all base", even, alone, None),
        ("64 rows, 64 of ranks 8-64", mixed, deal(64, 64), None),
        ("64 rows, 64 of rank 30", same, deal(64, 64), None),
        ("8192 rows, 64", even, deal(8192, 64), 560.0),
        ("2048 rows beside 63, 64", even, chunk, None),
    ]
    return [
        Case(name=name, adapters=adapters, counts=counts, who=who, target=target)
        for name, adapters, (counts, who), target in table
    ]


def tune(bench: Bench, step: Step, deadline: float) -> tuple[dict[str, Plans], list[str]]:
    """Try other plans, each projection for an equal share of the time."""
    best, lines = {}, []
    for index, module in enumerate(MODULES):
        until = time.monotonic() + (deadline - time.monotonic()) / (len(MODULES) - index)
        found: Plans = CHOSEN
        low = bench.turning(step, [module])
        tried = [(low, "as chosen")]
        for trial in trials(step.case.rows, module.width):
            if time.monotonic() > until:
                break
            plans = _joined(found, trial)
            try:
                took = bench.turning(step, [module], plans)
            except Exception as error:  # a plan may not fit the device: say so and go on
                print(f"{step.case.name}, {module.name}, {trial}: {error}", file=sys.stderr)
                continue
            tried.append((took, _short(plans)))
            if took < low:
                low, found = took, plans
        best[module.name] = found
        tried.sort(key=lambda entry: entry[0])
        shown = [*tried[:TRIED_SHOWN], *(e for e in tried[TRIED_SHOWN:] if e[1] == "as chosen")]
        lines.append(f"  {module.name:8}" + " | ".join(f"{us:.2f} {name}" for us, name in shown))
    return best, lines


def trials(rows: int, width: int) -> list[Plans]:
    """Plans to try; of a pair, the best expand plan is looked for with the best shrink plan."""
    if rows < MANY_ROWS:
        return [*add_plans(rows, width)]
    shrinks: list[Plans] = [(plan, None) for plan in shrink_plans()]
    return [*shrinks, *((None, plan) for plan in expand_plans())]


def _joined(found: Plans, trial: Plans) -> Plans:
    """What a trial leaves open as it was found best."""
    if not isinstance(trial, tuple) or not isinstance(found, tuple):
        return trial
    pair: Pair = (trial[0] or found[0], trial[1] or found[1])
    return pair


def _short(plans: Plans) -> str:
    """The numbers of each plan, in the order of its fields."""
    if isinstance(plans, tuple):
        named = zip("SE", plans, strict=True)
        return ", ".join(f"{name} {_numbers(plan)}" for name, plan in named if plan)
    return _numbers(plans)


def _numbers(plan: Any) -> str:
    """Sizes joined by x, with the flags that are set."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    flags = "".join(f" {name}" for name, value in values.items() if value is True)
    return "x".join(str(v) for v in values.values() if type(v) is int) + flags


def measure(bench: Bench, case: Case, deadline: float, layers: dict[str, Layers]) -> dict[str, Any]:
    """Check and time one case."""
    step = Step.of(case)
    error = step.check()
    if error > MARGIN:
        return {"error": error, "target": case.target}
    results: dict[str, Any] = {"error": round(error, 5), "target": case.target}
    results["bytes_us"] = round(1e6 * case.adapters.layer_bytes(case.who) / CEILING, 1)
    results["cold"] = round(bench.cold(step), 1)
    results["turning"] = round(bench.turning(step, MODULES), 1)
    with patch.object(launches, "overlaps", lambda device: False):
        results["no_overlap"] = round(bench.cold(step), 1)
    if case.rows < MANY_ROWS:
        for name, chain in layers.items():
            base, added = chain.added(step)
            results[name], results[f"{name}_base"] = round(added, 1), round(base, 1)
    if case.target and time.monotonic() < deadline:
        best, lines = tune(bench, step, deadline)
        print(f"\n{case.name}: a projection, turning through the layers")
        print("\n".join(lines), flush=True)
        error = step.check(best)
        results["best"] = round(bench.cold(step, best), 1) if error < MARGIN else None
    return results


COLUMNS = ("target", "bytes_us", "bf16", "nf4", "cold", "best", "no_overlap", "turning")


def fault(found: dict[str, Any]) -> str | None:
    """What is wrong with a case's results, if anything is."""
    if "failed" in found:
        return str(found["failed"])
    return f"WRONG: {found['error']:.3g}" if found["error"] > MARGIN else None


def main() -> int:
    """Measure all cases; print the plans tried, one table and the JSON line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300, help="for trying other plans, in all")
    parser.add_argument(
        "--layers", type=int, default=32, help="whose rank-rows are read in turn (%(default)s)"
    )
    parser.add_argument(
        "--base",
        nargs="*",
        choices=["bf16", "nf4"],
        default=["bf16"],
        help="weights of the base products (bf16)",
    )
    arguments = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(0)
    bench = Bench(device)
    results: dict[str, Any] = {}
    with torch.inference_mode():
        every = cases(arguments.layers, device)
        layers = {name: Layers(device, nf4=name == "nf4") for name in arguments.base}
        share = arguments.seconds / sum(case.target is not None for case in every)
        for case in every:
            deadline = time.monotonic() + share
            try:
                results[case.name] = measure(bench, case, deadline, layers)
            except Exception as error:  # one case that fails must not hide the others
                results[case.name] = {"failed": f"{type(error).__name__}: {error}"}
            print(f"{case.name:30} {results[case.name].get('cold')}", file=sys.stderr, flush=True)
    ceiling = read_ceiling()
    print(f"\nread ceiling {ceiling:.2f} TB/s; microseconds a layer")
    print(f"{'rows, adapters':30}" + "".join(f"{name:>12}" for name in COLUMNS))
    for name, found in results.items():
        wrong = fault(found)
        cells = "".join(f"{found.get(column) or '':>12}" for column in COLUMNS)
        print(f"{name:30}{cells if wrong is None else '  ' + wrong}")
    print_json("kernels_lora", {"ceiling": ceiling, "cases": results})
    return 1 if any(map(fault, results.values())) else 0


if __name__ == "__main__":
    sys.exit(main())
