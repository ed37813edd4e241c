"""The Triton kernels' tests that run in processes of their own: interpreted, and compiled."""

import pytest

from tests.kernels.beside import NAMES, Beside

TIMEOUT = 1800.0
"""Seconds for all of it, on cores that are shared."""


@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("name", NAMES)
def test_beside(name: str, beside: Beside) -> None:
    code, words = beside.result(name)
    assert code == 0, words[-10_000:]
