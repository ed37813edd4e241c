"""Check of the import path, for a script's first lines: it imports none of our packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def check_kernels_package() -> None:
    """Check that ``kernels`` is our package, not the one of that name on PyPI. Imports neither.

    Raises:
        ImportError: another package comes first on the import path, or none is there.
    """
    expected = Path(__file__).resolve().parents[1] / "kernels" / "__init__.py"
    spec = importlib.util.find_spec("kernels")
    found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    if found != expected:
        raise ImportError(
            f"the import name 'kernels' leads to {found}, not to {expected}: another package of "
            f"that name comes first. Run `pip uninstall kernels`, or put {expected.parents[1]} "
            f"first on PYTHONPATH"
        )
