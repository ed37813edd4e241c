"""The documentation names what there is, and all that there is."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from launch.options.fields import all_options
from launch.options.page import page
from server.admin import adapters, lifecycle, operation_routes, push, upload, vllm

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text("utf-8")
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
}
PACKAGES = ("kernels", "sharding", "tp_engine", "server", "launch", "tests")
OF_OTHERS = {
    "torchrun": "--nproc-per-node --nnodes --node-rank --master-addr --master-port",
    "ncu": "--clock-control --graph-profiling --profile-from-start --launch-count --section",
    "ruff": "--check",
    "argparse": "--help",
}
"""Flags of programs that are not ours."""


@cache
def sources() -> dict[str, str]:
    """Our Python files by path."""
    found = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in found}


def test_the_page_of_options_is_what_the_options_say() -> None:
    fresh = "run `python -m launch.options.page > docs/options.md`"
    assert PAGES["docs/options.md"] == page(), fresh


@pytest.mark.parametrize("name", PAGES)
def test_every_flag_is_one_of_ours_or_of_a_program_that_is_named(name: str) -> None:
    known = {flag for flags in OF_OTHERS.values() for flag in flags.split()}
    known |= {option.flag for option in all_options()}
    known |= {"--no-" + option.flag[2:] for option in all_options() if option.kind is bool}
    for text in sources().values():
        if "argparse" in text:
            known |= set(re.findall(r'"(--[a-z][a-z0-9-]*)"', text))
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", PAGES[name])) - {"--some-name"}
    assert used <= known


@pytest.mark.parametrize("name", PAGES)
def test_every_file_and_module_is_there(name: str) -> None:
    paths = sources()
    for mentioned in set(re.findall(r"[\w/]*\w\.py\b", PAGES[name])):
        assert any(path == mentioned or path.endswith("/" + mentioned) for path in paths), mentioned
    for module in set(re.findall(r"-m ((?:launch|tests)[\w.]*)", PAGES[name])):
        path = module.replace(".", "/")
        assert f"{path}.py" in paths or f"{path}/__main__.py" in paths, module
    for folder in set(re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w/]*)/`", PAGES[name])):
        assert (ROOT / folder).is_dir(), folder


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        if target.startswith("https://"):
            continue
        file, _, heading = target.partition("#")
        path = (ROOT / name).parent / file if file else ROOT / name
        assert path.is_file(), target
        if heading:
            titles = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
            assert heading in {anchor(title) for title in titles}, target


def anchor(title: str) -> str:
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_the_operators_routes_are_those_that_are_documented() -> None:
    served = {
        f"{method} {re.sub(r'{.*?}', 'X', route.path)}"
        for part in (adapters, lifecycle, operation_routes, push, upload, vllm)
        for route in part.router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    listed = re.findall(
        r"^\| `((?:GET|POST|DELETE) [^`]*)`", PAGES["docs/adapters.md"], re.MULTILINE
    )
    assert {re.sub(r"\b(NAME|ID)\b", "X", each) for each in listed} == served
    assert len(listed) == len(served)


@pytest.mark.parametrize("name", PAGES)
def test_every_metric_is_one_that_the_code_names(name: str) -> None:
    ours = [text for path, text in sources().items() if path.startswith(("tp_engine", "server"))]
    words = {word for text in ours for word in re.findall(r'"([\w:]+)"', text)}
    for metric in set(re.findall(r"\b(?:tp_engine|vllm):\w+", PAGES[name])):
        bare = metric.partition(":")[2]
        assert {metric, bare, bare.removesuffix("_total")} & words, metric
