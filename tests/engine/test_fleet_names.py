"""Names that are pinned, drained, resumed and counted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.fake import solo
from tests.engine.fleet_world import PARAMS, PROMPT, World, known, world_at, write_adapter
from tp_engine.adapters import ModelHeld, UnknownModel
from tp_engine.messages import (
    AdapterReply,
    DrainAdapter,
    FlushAdapters,
    Message,
    PinAdapter,
    PreloadAdapter,
    ResumeAdapter,
    UnloadAdapter,
)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_at(tmp_path) as world:
        yield world


def drain(world: World, name: str, *, seconds: float = 60.0, remove: bool = False) -> AdapterReply:
    return world.do(DrainAdapter, name=name, seconds=seconds, remove=remove)


def test_stats_give_the_names_that_adapters_have_now(world: World) -> None:
    for name in ("x", "y"):
        world.load(name, "good-2")
    world.load("z", "good-3")
    world.ask("r", "x")
    assert world.fleet.stats().waiting_adapters == ["x", "y"]
    world.step()
    stats = world.fleet.stats()
    assert (stats.running_adapters, stats.waiting_adapters) == (["x", "y"], [])
    world.load("x", "good-3", in_place=True)
    assert world.fleet.stats().running_adapters == ["y"], "x means another revision now"
    world.run()


@pytest.mark.parametrize("remove", [False, True])
def test_a_drained_name_takes_no_new_requests_and_finishes_the_others(
    remove: bool, world: World
) -> None:
    world.load("x", "good-2")
    world.load("y", "good-2")
    world.ask("r", "x")
    assert drain(world, "x", remove=remove).requests == 1
    with pytest.raises(ModelHeld, match="'x' is drained"):
        world.fleet.admit("base:x")
    assert world.fleet.admit("y") == "good-2" and world.show("x").draining
    assert world.fleet.changed, "what is served has"
    assert world.run()["r"] == solo("good-2", PROMPT, PARAMS)
    world.settle()
    if remove:
        with pytest.raises(UnknownModel):
            world.fleet.admit("x")
    else:
        assert world.show("x").draining
    assert world.fleet.admit("y") == "good-2" and known(world.engine) == ["good-2"]


@pytest.mark.parametrize("remove", [False, True])
def test_a_drain_ends_the_requests_of_its_name_alone_at_the_deadline(
    remove: bool, world: World
) -> None:
    world.load("x", "good-2")
    world.load("y", "good-2")
    for request_id, name in (("mine", "x"), ("other", "y"), ("longer", "base:x")):
        world.ask(request_id, name)
    world.step()
    assert world.begin(DrainAdapter, name="x", seconds=0.0, remove=remove) == []
    failed = world.step()
    assert {each.request_id for each in failed} == {"mine", "longer"}
    assert {each.code for each in failed} == {"adapter_draining"}
    assert world.run()["other"] == solo("good-2", PROMPT, PARAMS)
    assert ("x" in world.registry.adapters) is not remove


def test_a_drain_outlives_a_restart_until_it_is_resumed(tmp_path: Path) -> None:
    with world_at(tmp_path) as world:
        world.load("x", "good-2")
        drain(world, "x")
    with world_at(tmp_path) as world:
        with pytest.raises(ModelHeld):
            world.fleet.admit("x")
        assert world.do(ResumeAdapter, name="x").code is None
        assert world.fleet.admit("x") == "good-2"
    with world_at(tmp_path) as world:
        assert world.fleet.admit("x") == "good-2"


def test_a_drain_that_is_to_remove_does_so_whatever_process_lives_to_do_it(tmp_path: Path) -> None:
    with world_at(tmp_path) as world:
        for name, adapter in (("x", "good-2"), ("kept", "good-2"), ("resumed", "good-3")):
            world.load(name, adapter)
        world.push("pushed", "good-4")
        for name in ("x", "resumed", "pushed"):
            world.ask(name, name)
            assert drain(world, name, remove=True).code is None
        world.do(ResumeAdapter, name="resumed")
        assert sorted(world.registry.adapters) == ["kept", "pushed", "resumed", "x"], "they drain"
    with world_at(tmp_path) as world:
        assert sorted(world.registry.adapters) == ["kept", "resumed"]
        assert world.fleet.admit("resumed") == "good-3"
        kept = {path.name for path in (tmp_path / "store" / "revisions").iterdir()}
        assert kept == {"good-2", "good-3"}


def test_a_drain_that_the_store_does_not_hear_of_says_so(world: World) -> None:
    world.push("x", "good-4")
    world.loader.full = True
    reply = drain(world, "x", remove=True)
    assert reply.code == "store_failed" and "No space left" in reply.message


def test_a_name_that_was_resumed_is_not_taken_away(world: World) -> None:
    world.load("x", "good-2")
    world.ask("r", "x")
    world.step()
    drain(world, "x", remove=True)
    world.do(ResumeAdapter, name="x")
    world.ask("again", "x")
    tokens = world.run()
    world.settle()
    assert tokens["r"] == tokens["again"] == solo("good-2", PROMPT, PARAMS)
    assert world.fleet.admit("x") == "good-2"


def test_a_preload_brings_an_adapter_into_the_arena(world: World) -> None:
    world.load("x", "good-2")
    assert world.show("x").warm and not world.show("x").resident
    assert world.do(PreloadAdapter, name="x").revision == "good-2"
    assert world.show("x").resident
    assert world.engine.stats().gauges["pages_adapters"] == 2
    assert world.do(PreloadAdapter, name="x").code is None, "again"
    world.unload("x")
    assert world.engine.stats().gauges["pages_adapters"] == 0


def test_a_preload_that_finds_no_room_is_refused(world: World) -> None:
    world.load("big", "good-20")
    world.load("x", "good-19")
    world.ask("r", "big")
    world.step()
    world.step()
    refused = world.do(PreloadAdapter, name="x")
    assert refused.code == "no_room" and "19 pages" in refused.message


def test_a_preload_of_what_cannot_be_read_says_so(tmp_path: Path) -> None:
    with world_at(tmp_path, host_pages=3) as world:
        for name in ("good-2", "good-3"):
            world.load(name, name)
        assert not world.show("good-2").warm
        assert world.store is not None
        (world.store.directory("good-2") / "adapter_config.json").unlink()
        refused = world.do(PreloadAdapter, name="good-2", arena=False)
        assert refused.code == "unreadable" and not world.fleet.busy


def test_an_adapter_may_go_while_it_is_preloaded(tmp_path: Path) -> None:
    with world_at(tmp_path, host_pages=3) as world:
        for name in ("good-2", "good-3"):
            world.load(name, name)
        world.loader.gate.clear()
        assert world.begin(PreloadAdapter, name="good-2", arena=False) == []
        world.fleet.turn()
        assert world.begin(UnloadAdapter, name="good-2") == []
        replies: list[Message] = []
        while len(replies) < 2:  # the unload's too, in whatever order
            replies += world.turn()
        world.reader_idle()  # its files are gone
        world.loader.gate.set()
        world.settle()
        world.ask("r", "good-3")
        assert world.run()["r"] == solo("good-3", PROMPT, PARAMS)
        codes = {reply.code for reply in replies if isinstance(reply, AdapterReply)}
        assert codes == {None, "adapter_not_found"}
        assert known(world.engine) == ["good-3"]


def test_pinned_adapters_stay_on_the_hosts(tmp_path: Path) -> None:
    with world_at(tmp_path, host_pages=6) as world:
        write_adapter(tmp_path / "good-1", "good-1")
        for name in ("good-2", "good-3"):
            world.load(name, name)
        world.do(PinAdapter, name="good-2", pinned=True)
        world.load("good-1", "good-1")
        for name in ("good-3", "good-1", "good-3"):
            assert world.do(PreloadAdapter, name=name, arena=False).code is None
            assert world.show("good-2").warm
    with world_at(tmp_path, host_pages=6) as world:
        world.settle()
        world.until(lambda: world.show("good-2").warm)


def test_pins_leave_room_for_whoever_asks(tmp_path: Path) -> None:
    """The hosts have room for the largest adapter beside one of two that are pinned."""
    with world_at(tmp_path, host_pages=5) as world:
        write_adapter(tmp_path / "good-1", "good-1")
        for name in ("good-1", "good-2", "good-3"):
            world.load(name, name)
        for name in ("good-1", "good-2"):
            world.do(PinAdapter, name=name, pinned=True)
        for name in ("good-3", "good-2", "good-3"):
            world.ask(name, name)
            assert world.run()[name][-12:] == solo(name, PROMPT, PARAMS)
        assert world.show("good-1").pinned and world.show("good-2").pinned


def test_a_name_that_comes_again_is_as_new(world: World) -> None:
    world.load("x", "good-2")
    world.fleet.admit("x")
    world.do(PinAdapter, name="x", pinned=True)
    drain(world, "x")
    world.unload("x")
    world.load("x", "good-3")
    status = world.show("x")
    assert not status.pinned and not status.draining and status.hits == 0
    assert world.fleet.admit("x") == "good-3"


def test_hits_are_those_of_the_name(world: World) -> None:
    world.load("x", "good-2")
    world.load("y", "good-2")
    assert world.show("x").last_use is None
    for model in ("x", "base:x", "base", "y"):
        world.fleet.admit(model)
    for _ in range(5):
        with pytest.raises(UnknownModel):
            world.fleet.admit("nobody")
    assert (world.show("x").hits, world.show("y").hits) == (2, 1)
    assert world.show("x").last_use is not None


def test_what_is_shown_of_one_adapter_has_its_manifest(world: World) -> None:
    world.load("x", "good-2")
    manifest = world.show("x").manifest
    assert manifest is not None and manifest["digest"] == "good-2"
    assert manifest["modules"]["model.layers.0.self_attn.q_proj"]["rank"] == 4
    world.push("x", "good-4")
    assert world.show("x").manifest is None, "the store does not know it yet"


def test_running_and_waiting_requests_are_told_apart(world: World) -> None:
    world.load("x", "good-2")
    for number in range(6):  # there are four places
        world.ask(str(number), "x")
    world.step()  # copies the adapter
    world.step()
    status = world.show("x")
    assert status.requests == 6 and 0 < status.running < 6


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (PinAdapter, {"pinned": True}),
        (DrainAdapter, {"seconds": 1.0, "remove": False}),
        (ResumeAdapter, {}),
        (FlushAdapters, {}),
        (PreloadAdapter, {}),
    ],
)
def test_nothing_is_done_to_a_name_that_means_nothing(
    call: type, fields: dict[str, object], world: World
) -> None:
    assert world.do(call, name="nobody", **fields).code == "adapter_not_found"


def test_a_name_is_the_same_however_it_is_spelt(world: World) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    world.load(decomposed, "good-2")
    assert world.show(decomposed).name == composed
    assert world.do(PinAdapter, name=decomposed, pinned=True).code is None
    assert world.show(composed).pinned
    assert world.unload(decomposed).code is None
    world.settle()
    assert known(world.engine) == []
