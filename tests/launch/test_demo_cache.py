"""The demo's cache: an entry is whole or absent, and is built once."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch.demo.cache import cache_root, ensure_directory

ROOT = Path(__file__).resolve().parents[2]

BIG = 100 * 1024


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TP_ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Builder:
    """Writes a small and a large file, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, directory: Path) -> None:
        self.calls += 1
        (directory / "config.json").write_text("{}")
        (directory / "weights").write_bytes(b"w" * BIG)


def test_an_entry_is_built_once() -> None:
    build = Builder()
    first = ensure_directory("entry", "recipe", build)
    assert ensure_directory("entry", "recipe", build) == first
    assert build.calls == 1
    assert (first / "weights").stat().st_size == BIG


@pytest.mark.parametrize("name", ["config.json", "weights", "manifest.json"])
@pytest.mark.parametrize("damage", ["remove", "truncate"])
def test_a_damaged_entry_is_built_again(name: str, damage: str) -> None:
    build = Builder()
    path = ensure_directory("entry", "recipe", build) / name
    path.unlink() if damage == "remove" else path.write_bytes(path.read_bytes()[:-2])
    repaired = ensure_directory("entry", "recipe", build)
    assert build.calls == 2
    assert (repaired / "config.json").read_text() == "{}"
    assert (repaired / "weights").read_bytes() == b"w" * BIG


def test_a_small_file_changed_in_place_is_noticed() -> None:
    build = Builder()
    (ensure_directory("entry", "recipe", build) / "config.json").write_text("[]")
    assert (ensure_directory("entry", "recipe", build) / "config.json").read_text() == "{}"


def test_another_recipe_replaces_the_entry() -> None:
    build = Builder()
    ensure_directory("entry", "recipe", build)
    ensure_directory("entry", "other recipe", build)
    assert build.calls == 2


def test_a_failed_build_leaves_nothing(root: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise ValueError("checksum")

    with pytest.raises(ValueError, match="checksum"):
        ensure_directory("entry", "recipe", fail)
    assert [path.name for path in root.iterdir()] == [".entry.lock"]


BUILD_AND_LOG = """
import sys
from launch.demo.cache import ensure_directory

def build(directory):
    with open(sys.argv[1], "a") as log:
        log.write("built\\n")
    (directory / "file").write_text("built")

ensure_directory("entry", "recipe", build)
"""


def test_processes_that_want_the_same_entry_build_it_once(tmp_path: Path) -> None:
    # Not by multiprocessing: the tracker that it starts ends only after the session itself.
    log = tmp_path / "log"
    command = [sys.executable, "-c", BUILD_AND_LOG, log]
    workers = [subprocess.Popen(command, cwd=ROOT) for _ in range(3)]
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    assert log.read_text() == "built\n"


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TP_ENGINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_root() == Path("/elsewhere/tp-engine")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_root() == Path("/home/someone/.cache/tp-engine")
