"""A soak in words."""

from __future__ import annotations

from statistics import fmean

from tests.soak.run import Report

COUNTERS = (
    "steps",
    "adapter_loads",
    "adapter_evictions",
    "adapter_fetches",
    "adapter_host_evictions",
    "preemptions",
)
SHOWN = 20
"""Faults that are shown at most."""


def report_lines(report: Report) -> list[str]:
    """For people."""
    verdict = report.verdict
    lines = [
        f"{report.seconds / 60:g} minutes, {report.pages} pages",
        f"{verdict.outputs} outputs of {verdict.revisions} revisions compared, "
        f"{verdict.positions} tokens, {verdict.near_ties} near-ties, {len(verdict.wrong)} wrong",
        *(f"  {count:8d} {what}" for what, count in report.counts.items()),
        *(
            f"  {name}: mean {fmean(values):.1f}, most {max(values):.4g}, "
            f"in time {' '.join(f'{value:.4g}' for value in values[:: len(values) // 6 or 1])}"
            for name, values in report.gauges.items()
        ),
        *(f"  {name}: {report.counters[f'tp_engine:{name}_total']:g}" for name in COUNTERS),
        *(f"  {what}: {a:.1f} before, {b:.1f} after" for what, (a, b) in report.growth.items()),
        f"steps, in milliseconds of their own (no core for {report.starved:.0%} of the time); "
        "over: longer than 3 medians without loads, and the same on the wall",
        *(
            f"  {kind.name:34} {kind.count:7d} median {kind.median * 1e3:7.2f} 99 % "
            f"{kind.p99 * 1e3:7.2f} most {kind.longest * 1e3:7.2f} over {kind.over:5d} "
            f"{kind.over_wall:6d}"
            for kind in report.steps
        ),
    ]
    faults = [f"  {fault[:400]}" for fault in report.faults[:SHOWN]]
    return [*lines, f"{len(report.faults)} faults", *faults]
