"""Pushed adapters: served at once, dirty, written back, and never piled up."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.engine.fake import solo
from tests.engine.fleet_world import (
    PARAMS,
    PROMPT,
    FakeLoader,
    World,
    known,
    open_store,
    world_at,
    write_adapter,
)
from tp_engine.adapters.store import AdapterStore
from tp_engine.messages import (
    AdaptersFlushed,
    FlushAdapters,
    PinAdapter,
    PreloadAdapter,
    PushAdapter,
)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_at(tmp_path) as world:
        yield world


def history(world: World, name: str) -> list[str]:
    assert world.store is not None
    world.reader_idle()
    return [move.digest for move in world.store.moves(name)]


def revisions(world: World) -> set[str]:
    """On disk."""
    world.reader_idle()
    return {path.name for path in (world.root / "store" / "revisions").iterdir()}


def spooled(world: World) -> int:
    """Pushed files that are still there."""
    world.reader_idle()
    return len([*(world.root / "spool").iterdir()])


def test_a_push_is_served_at_once_and_durable_once_it_is_flushed(world: World) -> None:
    reply = world.push("x", "good-4")
    assert (reply.code, reply.revision, reply.durable) == (None, "good-4", False)
    assert world.show("x").dirty and revisions(world) == set()
    world.ask("r", "x")
    assert world.run()["r"] == solo("good-4", PROMPT, PARAMS)
    assert world.flush().written == ["x"]
    assert not world.show("x").dirty and history(world, "x") == ["good-4"]
    assert revisions(world) == {"good-4"} and spooled(world) == 0
    assert world.flush().written == []


def test_requests_keep_the_revision_that_was_pushed_over(world: World) -> None:
    world.push("x", "good-4")
    world.ask("before", "x")
    world.step()
    world.push("x", "good-5")
    world.ask("after", "x")
    tokens = world.run()
    assert tokens["before"] == solo("good-4", PROMPT, PARAMS)
    assert tokens["after"] == solo("good-5", PROMPT, PARAMS)
    world.settle()
    assert known(world.engine) == ["good-5"] and spooled(world) == 1


def test_equal_content_is_the_same_revision(world: World) -> None:
    world.load("x", "good-2")
    assert world.push("x", "good-2").durable, "it was loaded before"
    world.push("x", "good-4")
    again = world.push("x", "good-4")
    assert (again.revision, again.durable) == ("good-4", False)
    world.flush()
    assert world.push("x", "good-4").durable
    world.settle()
    assert history(world, "x") == ["good-4", "good-2"] and known(world.engine) == ["good-4"]


@pytest.mark.parametrize("every", [1, 3])
def test_a_training_loop_leaves_one_revision_and_one_step_back(every: int, world: World) -> None:
    world.load("x", "good-2")
    for step in range(10):
        world.push("x", f"good-{4 + step}")
        if step % every == 0:
            world.flush("x")
    world.settle()
    assert known(world.engine) == ["good-13"]
    assert history(world, "x")[-1] == "good-2" and len(history(world, "x")) == 2
    world.flush()
    assert history(world, "x") == ["good-13", "good-2"]
    assert revisions(world) == {"good-13", "good-2"} and spooled(world) == 0
    assert world.move("x", None).revision == "good-2"


def test_a_push_that_is_promoted_outlasts_the_next_ones(world: World) -> None:
    world.push("x", "good-4")
    assert world.move("x", "good-4").code is None, "it is written first"
    for adapter in ("good-5", "good-6"):
        world.push("x", adapter)
        world.flush()
    assert history(world, "x") == ["good-6", "good-4"]
    assert world.move("x", None).revision == "good-4"


def test_a_dirty_name_is_written_before_it_is_moved_back(world: World) -> None:
    world.load("x", "good-2")
    world.push("x", "good-4")
    assert world.move("x", None).revision == "good-2", "what it meant before the push"
    assert world.move("x", "good-4").revision == "good-4", "what was rolled back is still there"


def test_what_is_loaded_over_a_push_can_be_rolled_back_to_it(world: World) -> None:
    world.push("x", "good-4")
    assert world.load("x", "good-2", in_place=True).code is None
    assert history(world, "x") == ["good-2", "good-4"]
    assert world.move("x", None).revision == "good-4"


@pytest.mark.parametrize(
    ("name", "adapter", "code"),
    [
        ("x", "bad", "not_finite"),
        ("x", "good-99", "adapter_too_large"),
        ("base", "good-4", "name_refused"),
    ],
)
def test_a_refused_push_changes_nothing_and_leaves_nothing(
    name: str, adapter: str, code: str, world: World
) -> None:
    world.load("x", "good-2")
    assert world.push(name, adapter).code == code
    world.settle()
    assert world.registry.resolve("x").digest == "good-2" and known(world.engine) == ["good-2"]
    assert spooled(world) == 0 and not world.show("x").dirty


def test_a_push_beside_another_of_its_name_is_refused(world: World) -> None:
    world.loader.gate.clear()
    world.begin(PushAdapter, name="x", directory=str(world.spool("good-4")))
    (refused,) = world.begin(PushAdapter, name="x", directory=str(world.spool("good-5")))
    assert refused.code == "adapter_loading"
    world.loader.gate.set()
    world.until_answered()
    assert spooled(world) == 1 and known(world.engine) == ["good-4"]


def test_a_dirty_adapter_stays_on_the_hosts_until_it_is_written(tmp_path: Path) -> None:
    with world_at(tmp_path, host_pages=5) as world:
        write_adapter(tmp_path / "good-4", "good-4")
        world.push("x", "good-3")
        world.load("y", "good-2")
        world.load("z", "good-4")
        assert world.show("x").warm and not world.show("z").warm
        world.flush()
        assert world.show("x").on_disk
        assert world.do(PreloadAdapter, name="z", arena=False).code is None
        assert world.show("z").warm and not world.show("x").warm
        world.ask("r", "x")
        assert world.run()["r"] == solo("good-3", PROMPT, PARAMS), "read back from the store"


def test_a_cold_push_is_read_back_from_its_own_files(tmp_path: Path) -> None:
    with world_at(tmp_path, host_pages=5) as world:
        world.loader.full = True  # else x is written as soon as y has been read, and leaves it room
        world.push("x", "good-4")
        world.push("y", "good-3")
        world.until(lambda: world.engine.tiers.starved)
        assert world.show("y").dirty and not world.show("y").warm, "x leaves it no room"
        world.unload("x")
        world.ask("r", "y")
        assert world.run()["r"] == solo("good-3", PROMPT, PARAMS)
        assert revisions(world) == set() and spooled(world) == 1


def test_a_push_that_finds_no_room_has_the_others_written_to_get_it(tmp_path: Path) -> None:
    with world_at(tmp_path, host_pages=5) as world:
        world.push("x", "good-4")
        world.push("y", "good-3")
        world.until(lambda: world.engine.roster.is_warm("good-3"))
        assert not world.show("x").dirty and not world.show("x").warm
        assert history(world, "x") == ["good-4"]


def test_an_unloaded_push_is_gone_for_good(world: World) -> None:
    world.push("x", "good-4")
    world.unload("x")
    world.settle()
    assert (revisions(world), spooled(world), known(world.engine)) == (set(), 0, [])


def test_two_names_of_one_push_are_both_written(world: World) -> None:
    world.push("x", "good-4")
    world.push("y", "good-4")
    assert world.flush("x").written == ["x"]
    assert world.flush().written == ["y"]
    assert history(world, "x") == history(world, "y") == ["good-4"]


def test_dirty_revisions_are_written_when_they_are_due(tmp_path: Path) -> None:
    with world_at(tmp_path, flush_interval=0.05) as world:
        world.push("x", "good-4")
        while world.show("x").dirty:
            world.turn()
        assert history(world, "x") == ["good-4"]


def test_a_full_disk_is_shown_and_tried_again(world: World) -> None:
    world.push("x", "good-4")
    world.loader.full = True
    answer = world.flush()
    assert answer.written == [] and "No space" in answer.failed["x"]
    status = world.show("x")
    assert status.dirty and "No space" in status.write_error
    refused = world.load("x", "good-2", in_place=True)
    assert refused.code == "store_failed" and world.registry.resolve("x").digest == "good-4"
    world.loader.full = False
    assert world.flush().written == ["x"] and not world.show("x").dirty


def test_a_name_that_is_pushed_to_while_it_is_flushed_is_not_called_written(world: World) -> None:
    world.push("x", "good-4")
    world.loader.gate.clear()
    world.begin(FlushAdapters)
    world.begin(PushAdapter, name="x", directory=str(world.spool("good-5")))
    world.loader.gate.set()
    world.reader_idle()
    answers = world.fleet.turn()
    (flushed,) = [each for each in answers if isinstance(each, AdaptersFlushed)]
    assert (flushed.written, flushed.failed) == ([], {})
    assert world.show("x").dirty and world.flush().written == ["x"]


def test_a_stop_writes_everything(world: World) -> None:
    world.push("x", "good-4")
    world.loader.full = True
    world.flush()
    world.loader.full = False
    world.begin(PushAdapter, name="y", directory=str(world.spool("good-5")))
    while not world.fleet.put_away():
        world.turn()
    assert world.fleet.unsaved == []
    assert history(world, "x") == ["good-4"] and history(world, "y") == ["good-5"]


def test_a_stop_tells_what_it_cannot_write(world: World) -> None:
    world.push("x", "good-4")
    world.loader.full = True
    while not world.fleet.put_away():
        world.turn()
    assert world.fleet.unsaved == ["x"]


def test_a_pinned_push_is_pinned_after_a_restart(tmp_path: Path) -> None:
    with world_at(tmp_path) as world:
        world.push("x", "good-4")
        assert world.do(PinAdapter, name="x", pinned=True).code is None
        assert world.show("x").pinned
    with world_at(tmp_path) as world:
        assert world.show("x").pinned and world.registry.resolve("x").digest == "good-4"
        world.push("x", "good-5")
        assert world.show("x").pinned
        world.do(PinAdapter, name="x", pinned=False)
        assert not world.show("x").pinned


# --- killed while it writes ----------------------------------------------------------------------


def train(root: Path, say: int) -> None:
    """Push and flush until killed; each acknowledgement is one line on a pipe."""
    store = open_store(root / "store")
    loader = FakeLoader(store)
    for step in range(4, 6):
        name = f"good-{step}"
        revision, _ = loader.load_pushed(write_adapter(root / "spool" / name, name))
        loader.settled(revision.digest)
        os.write(say, f"pushed {name}\n".encode())
        name_it = partial(loader.record_pushed, "x", revision.digest)
        let_go = loader.write_back(revision.digest, name_it)
        os.write(say, f"durable {name}\n".encode())
        for digest in let_go:
            loader.discard(digest)
    store.close()


def test_a_kill_around_a_flush_loses_nothing_that_was_durable(tmp_path: Path) -> None:
    from tests.adapters.test_store import kill_at

    for count in range(1, 400):
        root = tmp_path / str(count)
        root.mkdir()
        heard, say = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                kill_at(count)
                train(root, say)
            except BaseException:
                os._exit(1)
            os._exit(0)
        os.close(say)
        with os.fdopen(heard) as pipe:
            said = pipe.read().split("\n")[:-1]
        _, status = os.waitpid(child, 0)
        check(open_store(root / "store"), root, said)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0 and len(said) == 4
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert count > 20, "there are fewer steps than a flush must have"


def check(store: AdapterStore, root: Path, said: list[str]) -> None:
    """The name means the last durable push, or the one that was being written."""
    durable = [line.split()[1] for line in said if line.startswith("durable")]
    pushed = [line.split()[1] for line in said if line.startswith("pushed")]
    means = {alias.name: alias.digest for alias in store.aliases()}.get("x")
    assert means in (durable[-1] if durable else None, pushed[-1] if pushed else None)
    if means is not None:
        assert (store.directory(means) / "adapter_config.json").read_text() == means
    # At most one that was written but not named yet is left besides.
    assert len({row.manifest.digest for row in store.revisions()} - {means}) <= 1
    store.close()
