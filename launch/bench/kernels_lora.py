"""LoRA kernels on one GPU: Llama-3.1-8B's four projections, bfloat16, all seven sites.

    python launch/bench/kernels_lora.py [--seconds 300] [--layers 32]

Each case is first compared with the reference. A layer is the shrink and expand launches of the
projections qkv, o, gate_up and down. Times are medians of CUDA graph replays, in microseconds:

    cold        L2 is emptied before every layer, the time of which is taken off
    turning     the layers one after the other, each with rank-rows of its own
    in_graph    cold, as in a captured step: room for as many segments as rows, no bound on theirs
    best        in_graph, with the best tile sizes that were tried for each projection
    no_overlap  cold, without programmatic dependent launch

The best plans that were tried are printed before the table: microseconds of a projection's pair of
launches, with the plans that differ from the chosen ones.
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

from kernels.lora import LoraSegments, launches  # noqa: E402
from kernels.lora.plans import MANY_ROWS  # noqa: E402
from launch.bench.environment import print_json  # noqa: E402
from launch.bench.lora_arena import MODULES, Adapters, deal, make_adapters, zipf  # noqa: E402
from launch.bench.lora_plans import expand_plans, shrink_plans  # noqa: E402
from launch.bench.lora_step import CHOSEN, Bench, Case, Plans, Step  # noqa: E402

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


def in_graph(step: Step) -> Step:
    """The step as a captured decode step has it: room for as many segments as rows, no bound."""
    old, rows = step.segments, step.case.rows
    count = max(0, rows - len(old.descriptors)) if rows < MANY_ROWS else 0
    room = LoraSegments(
        offsets=torch.cat((old.offsets, old.offsets[-1:].expand(count))),
        descriptors=torch.cat((old.descriptors, old.descriptors.new_full((count,), -1))),
        max_rank=old.max_rank,
    )
    return Step(case=step.case, segments=room, inputs=step.inputs, outputs=step.outputs)


def tune(bench: Bench, step: Step, deadline: float) -> tuple[dict[str, Plans], list[str]]:
    """Try other plans, a projection at a time: the best shrink, then the best expand with it."""
    case, best, lines = step.case, {}, []
    longest = max(case.counts)
    for module in MODULES:
        found: Plans = CHOSEN
        low = bench.turning(step, [module])
        tried = [(low, "as chosen")]
        trials: list[Plans] = [(plan, None) for plan in shrink_plans(case.rows, longest)]
        trials += [(None, plan) for plan in expand_plans(case.rows, longest)]
        for trial in trials:
            if time.monotonic() > deadline:
                break
            plans = (trial[0] or found[0], trial[1] or found[1])
            try:
                took = bench.turning(step, [module], plans)
            except Exception as error:  # a plan may not fit the device: say so and go on
                print(f"{case.name}, {module.name}, {trial}: {error}", file=sys.stderr)
                continue
            tried.append((took, _short(plans)))
            if took < low:
                low, found = took, plans
        best[module.name] = found
        tried.sort(key=lambda entry: entry[0])
        shown = [*tried[:TRIED_SHOWN], *(e for e in tried[TRIED_SHOWN:] if e[1] == "as chosen")]
        lines.append(f"  {module.name:8}" + " | ".join(f"{us:.2f} {name}" for us, name in shown))
    return best, lines


def _short(plans: Plans) -> str:
    """The numbers of each plan, in the order of its fields."""
    named = zip("SE", plans, strict=True)
    return ", ".join(f"{name} {_numbers(plan)}" for name, plan in named if plan)


def _numbers(plan: Any) -> str:
    """Sizes joined by x, with the flags that are set."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    flags = "".join(f" {name}" for name, value in values.items() if value is True)
    return "x".join(str(v) for v in values.values() if type(v) is int) + flags


def measure(bench: Bench, case: Case, deadline: float) -> dict[str, Any]:
    """Check and time one case."""
    step = Step.of(case)
    graph = in_graph(step)
    error = max(step.check(), graph.check())
    if error > MARGIN:
        return {"error": error, "target": case.target}
    results: dict[str, Any] = {"error": round(error, 5), "target": case.target}
    results["bytes_us"] = round(1e6 * case.adapters.layer_bytes(case.who) / CEILING, 1)
    results["cold"] = round(bench.cold(step), 1)
    results["turning"] = round(bench.turning(step, MODULES), 1)
    with patch.object(launches, "can_overlap", lambda device: False):
        results["no_overlap"] = round(bench.cold(step), 1)
    results["in_graph"] = round(bench.cold(graph), 1)
    if case.target and time.monotonic() < deadline:
        best, lines = tune(bench, graph, deadline)
        print(f"\n{case.name}, as in a graph: a projection's pair, turning through the layers")
        print("\n".join(lines), flush=True)
        error = graph.check(best)
        results["best"] = round(bench.cold(graph, best), 1) if error < MARGIN else None
    return results


COLUMNS = ("target", "bytes_us", "cold", "in_graph", "best", "no_overlap", "turning")


def main() -> None:
    """Measure all cases; print the plans tried, one table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300, help="no new plan is tried after it")
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    device = torch.device("cuda")
    torch.manual_seed(0)
    bench = Bench(device)
    results: dict[str, Any] = {}
    with torch.inference_mode():
        for case in cases(arguments.layers, device):
            try:
                results[case.name] = measure(bench, case, deadline)
            except Exception as error:  # one case that fails must not hide the others
                results[case.name] = {"failed": f"{type(error).__name__}: {error}"}
            print(f"{case.name:30} {results[case.name].get('cold')}", file=sys.stderr, flush=True)
    print(f"\nread ceiling {bench.ceiling() / 1e12:.2f} TB/s; microseconds a layer")
    print(f"{'rows, adapters':30}" + "".join(f"{name:>12}" for name in COLUMNS))
    for name, found in results.items():
        wrong = found.get("failed") or (found["error"] > MARGIN and f"WRONG: {found['error']:.3g}")
        cells = "".join(f"{found.get(column) or '':>12}" for column in COLUMNS)
        print(f"{name:30}{'  ' + wrong if wrong else cells}")
    print_json("kernels_lora", {"ceiling": bench.ceiling(), "cases": results})


if __name__ == "__main__":
    main()
