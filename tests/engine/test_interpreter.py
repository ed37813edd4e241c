"""What a process that serves asks of Python itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from tp_engine.interpreter import ready_interpreter

FASTEST_STEP = 0.002
"""Seconds, of one request on one GPU."""


@pytest.fixture
def as_it_was() -> Iterator[None]:
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()


@pytest.mark.usefixtures("as_it_was")
def test_a_thread_that_runs_python_holds_up_a_step_by_a_part_of_it_at_most() -> None:
    ready_interpreter()
    assert sys.getswitchinterval() < FASTEST_STEP / 2


@pytest.mark.usefixtures("as_it_was")
def test_what_exists_is_not_looked_at_again() -> None:
    before = gc.get_freeze_count()
    made = [[] for _ in range(1000)]
    ready_interpreter()
    assert gc.get_freeze_count() >= before + len(made)
