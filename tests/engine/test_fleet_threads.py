"""What waits for what: names for no load, and what lasts is what the calls said, in their order."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.fake import solo, submit
from tests.engine.fleet_world import PARAMS, PROMPT, World, known, world_at
from tp_engine.adapters import ModelHeld
from tp_engine.fleet import roots
from tp_engine.messages import (
    AdapterReply,
    AdaptersFlushed,
    DrainAdapter,
    FlushAdapters,
    LoadAdapter,
    Message,
    MoveAdapter,
    PinAdapter,
    ResumeAdapter,
    UnloadAdapter,
)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_at(tmp_path) as world:
        yield world
        world.loader.gate.set()


def meanings(world: World) -> dict[str, str]:
    """Of the store's names, now."""
    assert world.store is not None
    return {alias.name: alias.digest for alias in world.store.aliases()}


def answers(world: World, count: int) -> list[Message]:
    """The next ones."""
    found: list[Message] = []
    deadline = time.monotonic() + 10
    while len(found) < count:
        assert time.monotonic() < deadline
        found += world.turn()
    return found


def begin_slow_load(world: World, name: str = "slow") -> None:
    """A load that the reader is in, until the gate opens."""
    world.loader.gate.clear()
    assert world.begin_load(name, "good-19") == []


def test_neither_what_is_asked_nor_what_is_done_to_names_waits_for_a_load(world: World) -> None:
    for name in ("x", "y", "z"):
        world.load(name, "good-2")
    begin_slow_load(world)
    assert world.show("x").history == ["good-2"]
    assert world.do(PinAdapter, name="x", pinned=True).code is None
    assert world.do(DrainAdapter, name="x", seconds=60.0, remove=False).code is None
    assert world.do(DrainAdapter, name="y", seconds=60.0, remove=False).code is None
    assert world.do(ResumeAdapter, name="y").code is None
    assert world.unload("z").code is None
    assert world.store is not None and "slow" not in world.registry.adapters
    assert [(a.name, a.pinned, bool(a.hold)) for a in world.store.aliases()] == [
        *(("x", True, True), ("y", False, False)),
    ]
    world.loader.gate.set()
    assert world.until_replied().revision == "good-19"


@pytest.mark.parametrize("behind", ["a load", "its files"])
def test_an_unload_does_not_wait_for_a_write_back_and_is_not_undone_by_it(
    behind: str, world: World
) -> None:
    world.push("x", "good-4")
    if behind == "a load":
        begin_slow_load(world)
    world.loader.gate.clear()
    world.begin(FlushAdapters)
    world.until(lambda: any((world.root / "store" / "incoming").iterdir()))
    world.begin(UnloadAdapter, name="x")
    (flushed,) = (each for each in answers(world, 2) if isinstance(each, AdaptersFlushed))
    assert flushed.written == [] and meanings(world) == {}
    world.loader.gate.set()
    world.settle()
    slow = {"slow": "good-19"} if behind == "a load" else {}
    assert meanings(world) == slow and known(world.engine) == [*slow.values()]
    assert world.store is not None
    assert [row.manifest.digest for row in world.store.revisions()] == [*slow.values()]
    assert not [*(world.root / "spool").iterdir()]


def test_a_name_that_is_pushed_again_after_it_went_gets_the_new_revision(world: World) -> None:
    world.push("x", "good-4")
    world.loader.gate.clear()
    world.begin(FlushAdapters)
    world.begin(UnloadAdapter, name="x")
    world.until(lambda: not world.fleet._recording.busy)
    world.begin(MoveAdapter, name="x", revision=None)  # refused in its turn
    world.loader.gate.set()
    world.settle()
    world.push("x", "good-5")
    world.flush()
    world.settle()
    assert meanings(world) == {"x": "good-5"} and known(world.engine) == ["good-5"]


@pytest.mark.parametrize("last", [True, False])
def test_what_is_done_to_a_dirty_name_lasts_in_its_order(last: bool, tmp_path: Path) -> None:
    with world_at(tmp_path) as world:
        world.push("x", "good-4")
        begin_slow_load(world)
        for wanted in (not last, last):
            world.begin(PinAdapter, name="x", pinned=wanted)
            drain = {"seconds": 60.0, "remove": False} if wanted else {}
            world.begin(DrainAdapter if wanted else ResumeAdapter, name="x", **drain)
        world.fleet._recorder.submit(lambda: None).result(10)
        assert world.fleet.turn() == [], "the store does not know the name"
        world.loader.gate.set()
        assert all(isinstance(each, AdapterReply) and not each.code for each in answers(world, 5))
        assert not world.show("x").dirty
    with world_at(tmp_path) as world:
        assert (world.show("x").pinned, world.show("x").draining) == (last, last)
        if last:
            with pytest.raises(ModelHeld):
                world.fleet.admit("x")


def test_a_pin_that_cannot_be_written_says_so_and_lasts_once_it_can(tmp_path: Path) -> None:
    with world_at(tmp_path) as world:
        world.push("x", "good-4")
        world.loader.full = True
        refused = world.do(PinAdapter, name="x", pinned=True)
        assert refused.code == "store_failed" and "not for good" in refused.message
        world.loader.full = False
        assert world.flush().written == ["x"]
    with world_at(tmp_path) as world:
        assert world.show("x").pinned


def test_the_loop_does_not_wait_for_the_disk_that_a_path_lies_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    resolve = roots.resolve_adapter_path

    def slowly(path: str) -> Path:
        assert answers.wait(10)
        return resolve(path)

    monkeypatch.setattr(roots, "resolve_adapter_path", slowly)
    assert world.begin_load("x", "good-2") == []
    submit(world.engine, "r", PROMPT, PARAMS)
    assert world.run()["r"] == solo("", PROMPT, PARAMS) and world.fleet.busy
    answers.set()
    assert world.until_replied().revision == "good-2"
    assert world.do(LoadAdapter, name="y", path=str(world.root / "..")).code == "path_refused"


def test_what_is_left_out_is_not_erased_while_it_is_loaded(tmp_path: Path) -> None:
    with world_at(tmp_path) as world:
        world.load("x", "good-3")
        assert world.store is not None
        (world.store.directory("good-3") / "adapter_config.json").write_text("damaged!")
    with world_at(tmp_path) as world:
        world.loader.gate.clear()
        world.begin_load("x", "good-3")
        (refused,) = world.begin(UnloadAdapter, name="x")
        assert refused.code == "adapter_loading"
        world.loader.gate.set()
        assert world.until_replied().revision == "good-3"
        assert world.unload("x").code is None and meanings(world) == {}
