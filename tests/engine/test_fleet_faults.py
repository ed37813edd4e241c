"""The store fails under a fleet: calls are refused, nothing is lost unheard, the rest goes on."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.fake import solo
from tests.engine.fleet_world import PARAMS, PROMPT, World, known, open_store, world_at
from tp_engine.messages import AdapterReply, ListAdapters, PinAdapter


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_at(tmp_path) as world:
        yield world


def set_read_only(world: World, on: bool) -> None:
    """Let every write to the index fail, as on a full disk, or work again."""
    assert world.store is not None
    world.reader_idle()
    world.store._index._db.execute(f"PRAGMA query_only = {int(on)}")


def test_an_index_that_cannot_be_written_fails_calls_alone(world: World) -> None:
    world.load("x", "good-2")
    world.ask("r", "x")
    set_read_only(world, True)
    assert world.load("y", "good-3").code == "store_failed" and "y" not in world.registry.adapters
    assert world.do(PinAdapter, name="x", pinned=True).code == "store_failed"
    world.push("z", "good-4")
    assert "index of the adapter store" in world.flush().failed["z"]
    assert world.run()["r"] == solo("good-2", PROMPT, PARAMS)
    set_read_only(world, False)
    assert world.load("y", "good-3").code is None and world.flush().written == ["z"]


def test_files_that_go_before_they_are_read_are_no_fault_of_the_store(world: World) -> None:
    (world.root / "good-2" / "adapter_model.safetensors").unlink()
    assert world.load("x", "good-2").code == "unreadable"


def test_a_store_that_cannot_be_read_refuses_a_list(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.load("x", "good-2")

    def kept(*arguments: object, **options: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(world.loader, "kept", kept)
        answer = world.until_answered(*world.begin(ListAdapters))
        assert isinstance(answer, AdapterReply)
        assert (answer.code, "Input/output" in answer.message) == ("store_failed", True)
    assert world.show("x").revision == "good-2"


def test_a_row_of_the_index_that_cannot_be_understood_fails_calls_alone(world: World) -> None:
    world.load("x", "good-2")
    assert world.store is not None
    world.reader_idle()
    world.store._index._db.execute("UPDATE revisions SET manifest = ?", (b"{'",))
    answer = world.until_answered(*world.begin(ListAdapters, name="x"))
    assert isinstance(answer, AdapterReply) and answer.code == "store_failed"
    assert world.load("y", "good-2").code == "store_failed"
    world.ask("r", "x")
    assert world.run()["r"] == solo("good-2", PROMPT, PARAMS)


def test_what_nobody_waits_for_is_logged_when_it_fails(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def discard(digest: str) -> None:
        raise OSError(30, f"Read-only file system: {digest}")

    world.load("x", "good-2")
    monkeypatch.setattr(world.loader, "discard", discard)
    world.unload("x")
    world.settle()
    assert "Read-only file system: good-2" in caplog.text


def test_a_stop_waits_for_the_store_to_know_what_was_done(tmp_path: Path) -> None:
    gate = threading.Event()
    with world_at(tmp_path) as world:
        world.load("x", "good-2")
        world.fleet._recorder.submit(gate.wait, 10)
        world.unload_begun("x")
        assert not world.fleet.put_away()
        gate.set()
        while not world.fleet.put_away():
            world.fleet.turn()
    store = open_store(tmp_path / "store")
    assert store.aliases() == []
    store.close()


def test_loads_that_fail_do_not_put_off_the_end_of_a_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with world_at(tmp_path, drain_timeout=0.2) as world:
        world.load("x", "good-2")
        world.ask("r", "x")
        world.unload("x")
        monkeypatch.setattr(world.loader, "record", record)
        until = time.monotonic() + 5
        while "r" in world.engine.requests:
            assert time.monotonic() < until
            assert world.load("y", "good-2").code == "store_failed"
        world.settle()
        assert known(world.engine) == []
