"""``launch/serve.py`` with every rank noting its steps, see `tests.soak.steps`."""

import os
import runpy
import sys
import time
from pathlib import Path
from typing import IO, Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)
NOTED = 200
"""Records between writes."""


def note_steps() -> None:
    """Wrap the runner of this process.

    On rank 0 a step begins where the one before it ended, if there was work all along: what lies
    between them is part of what a client waits for.
    """
    from tp_engine.engine import Engine
    from tp_engine.steps.runner import Runner

    path = Path(os.environ["SOAK_STEPS"]) / f"steps-{os.environ.get('RANK', '0')}"
    file: IO[bytes] = path.open("wb", buffering=0)
    records: list[tuple[float, ...]] = []
    before: list[tuple[float, float]] = []
    execute, step = Runner.execute, Engine.step

    def stepped(self: Engine) -> Any:
        outputs = step(self)
        before[:] = [(time.monotonic(), _waited())] if self.requests else []
        return outputs

    def noted(self: Runner, plan: Any) -> Any:
        began, waited = before[0] if before else (time.monotonic(), _waited())
        result = execute(self, plan)
        ended = time.monotonic()
        sequences = plan.sequences.reshape(-1, 4)
        rows = int(sequences[:, 1].sum())
        waited = _waited() - waited
        records.append((plan.step, began, ended, waited, rows, len(sequences)))
        if len(records) == NOTED:
            file.write(np.array(records, np.float64).tobytes())
            records.clear()
        return result

    Engine.step = stepped  # type: ignore[method-assign]
    Runner.execute = noted  # type: ignore[method-assign]


def _waited() -> float:
    """Seconds that this thread was ready to run and had no core."""
    with open("/proc/thread-self/schedstat", "rb") as file:
        return int(file.read().split()[1]) / 1e9


if __name__ == "__main__":
    note_steps()
    sys.argv[0] = str(ROOT / "launch" / "serve.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
