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
    from tp_engine.runner import Arena, Runner

    path = Path(os.environ["SOAK_STEPS"]) / f"steps-{os.environ.get('RANK', '0')}"
    file: IO[bytes] = path.open("wb", buffering=0)
    records: list[tuple[float, ...]] = []
    copied: list[tuple[int, float]] = []
    before: list[tuple[float, float]] = []
    execute, publish, step = Runner.execute, Arena.publish, Engine.step

    def stepped(self: Engine) -> Any:
        outputs = step(self)
        before[:] = [(time.monotonic(), _waited())] if self.requests else []
        return outputs

    def noted(self: Runner, plan: Any) -> Any:
        copied.clear()
        began, waited = before[0] if before else (time.monotonic(), _waited())
        result = execute(self, plan)
        ended = time.monotonic()
        sequences = plan.sequences.reshape(-1, 4)
        rows = int(sequences[:, 1].sum())
        pages, seconds = sum(p for p, _ in copied), sum(s for _, s in copied)
        waited = _waited() - waited
        records.append((plan.step, began, ended, waited, rows, len(sequences), pages, seconds))
        if len(records) == NOTED:
            file.write(np.array(records, np.float64).tobytes())
            records.clear()
        return result

    def timed(self: Arena, image: Any, descriptor: int, pages: list[int], layers: int) -> None:
        began = time.monotonic()
        publish(self, image, descriptor, pages, layers)
        copied.append((len(pages), time.monotonic() - began))

    Engine.step = stepped  # type: ignore[method-assign]
    Runner.execute = noted  # type: ignore[method-assign]
    Arena.publish = timed  # type: ignore[method-assign]


def _waited() -> float:
    """Seconds that this thread was ready to run and had no core."""
    with open("/proc/thread-self/schedstat", "rb") as file:
        return int(file.read().split()[1]) / 1e9


if __name__ == "__main__":
    note_steps()
    sys.argv[0] = str(ROOT / "launch" / "serve.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
