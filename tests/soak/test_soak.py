"""75 seconds of everything that happens to a fleet; ``python -m tests.soak`` takes longer."""

from pathlib import Path

import pytest

from tests.distributed.agreement import NEAR_TIE_SHARE
from tests.soak.options import SoakOptions
from tests.soak.report import report_lines
from tests.soak.run import run_soak

HAPPENED = (
    "deleted",
    "drained and resumed",
    "left before an answer",
    "left within a stream",
    "of two loads one refused",
    "pinned, unpinned or flushed",
    "promoted",
    "pushed",
    "refused",
    "replaced",
    "rolled back",
    "whole answers",
    "whole streams",
)
LONG_STEPS, STARVED = 0.03, 0.4
"""Share of steps that may be long, where the ranks had cores but for the other share of the time:
gloo's own threads wait for a core too, which nobody counts."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_output_is_that_of_its_revision_and_nothing_is_left(tmp_path: Path) -> None:
    report = run_soak(SoakOptions(seconds=75.0, pause=0.2, seed=1), tmp_path)
    print("\n".join(report_lines(report)))
    assert report.faults == []
    assert [what for what in HAPPENED if not report.counts.get(what)] == []
    verdict = report.verdict
    assert verdict.outputs > 200 and verdict.revisions > 80
    assert verdict.near_ties <= NEAR_TIE_SHARE * verdict.positions
    for counter in ("adapter_evictions", "adapter_host_evictions", "adapter_fetches"):
        assert report.counters[f"tp_engine:{counter}_total"] > 20
    before, after = report.growth["files"]
    assert after <= before + 20
    if report.starved > STARVED:
        return
    steps = {kind.name: kind for kind in report.steps}
    for name in ("decode", "with prompts"):
        assert steps[f"{name} during a load"].median < 1.6 * steps[name].median
    for kind in report.steps:
        assert kind.over <= 3 + LONG_STEPS * kind.count, kind
