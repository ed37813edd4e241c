"""The package tells what is where."""

import pkgutil
import re

import tp_engine


def test_every_module_has_its_place_in_the_map_of_the_package() -> None:
    modules = {module.name for module in pkgutil.iter_modules(tp_engine.__path__)}
    assert len(modules) > 40
    assert modules - set(re.findall(r"\w+", tp_engine.__doc__ or "")) == set()
