"""Triton and Gluon kernels compiled for GPUs that need not be there.

`tests/kernels/test_beside.py` runs these files in processes of their own; they are collected only
where they are asked for by name.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """True for no; else whatever others say."""
    asked = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(HERE) for path in asked) else True
