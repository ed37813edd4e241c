"""Sums of a decode step's launches, and the cases of the engine's benchmark."""

from __future__ import annotations

import argparse

import pytest

from launch.bench.engine import CASES, decode_cases
from launch.bench.step_profile import Launch, summarise, table


def test_sums_are_by_kernel_a_step_and_overlap_counts_once_as_busy() -> None:
    launches = [
        Launch(name="b", start=40.0, end=100.0),
        Launch(name="a", start=0.0, end=10.0),
        Launch(name="a", start=5.0, end=25.0),
        Launch(name="a", start=6.0, end=7.0),
    ]
    found = summarise(launches, steps=2)
    assert [(k.name, k.launches, k.total) for k in found.kernels] == [
        ("b", 0.5, 30),
        ("a", 1.5, 15.5),
    ]
    assert found.kernel_sum == pytest.approx(91 / 2 / 1000)
    assert found.busy == pytest.approx(85 / 2 / 1000)
    assert found.span == pytest.approx(100 / 2 / 1000)
    assert "0.910 of the step" in table(found, step_ms=0.05)
    idle = {(gap.before, gap.after): gap.total for gap in found.gaps}
    assert idle["a", "b"] == pytest.approx(15 / 2) and sum(idle.values()) == pytest.approx(15 / 2)


def test_nothing_recorded_is_an_error() -> None:
    with pytest.raises(ValueError, match="none were recorded"):
        summarise([], steps=1)


def test_cases_are_batch_and_adapters() -> None:
    assert decode_cases("1x0,256x64") == [(1, 0), (256, 64)]
    assert decode_cases("") == []
    assert (64, 32) in decode_cases(CASES)


@pytest.mark.parametrize("text", ["64", "64x", "x1", "2x3", "-1x0", "1x0 2x0"])
def test_other_cases_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="BATCHxADAPTERS"):
        decode_cases(text)
