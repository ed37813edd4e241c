"""The package tells what is where."""

import pkgutil
import re
from importlib import import_module

import pytest

PACKAGES = ("tp_engine", *(f"tp_engine.{name}" for name in ("ranks", "requests", "steps", "tiers")))


@pytest.mark.parametrize("name", PACKAGES)
def test_every_module_has_its_place_in_the_map_of_its_package(name: str) -> None:
    package = import_module(name)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert len(modules) >= 4
    assert modules - set(re.findall(r"\w+", package.__doc__ or "")) == set()
