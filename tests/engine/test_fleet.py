"""Loads, moves and unloads: what happens when."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.fake import solo, submit
from tests.engine.fleet_world import PARAMS, PROMPT, World, known, world_at, write_adapter
from tp_engine.messages import AdapterList, Failed, ListAdapters, LoadAdapter, UnloadAdapter


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_at(tmp_path) as world:
        yield world


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[World]:
    with world_at(tmp_path, drain_timeout=0.0) as world:
        yield world


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[World]:
    """Without a store."""
    world = World(tmp_path, store=None)
    yield world
    world.fleet.close()


def in_store(world: World) -> tuple[dict[str, str], set[str]]:
    """What the store's names mean, and the revisions that it has."""
    assert world.store is not None
    world.reader_idle()
    names = {alias.name: alias.digest for alias in world.store.aliases()}
    return names, {row.manifest.digest for row in world.store.revisions()}


def test_a_load_moves_the_name_when_all_ranks_have_it(world: World) -> None:
    reply = world.load("x", "good-2")
    assert (reply.code, reply.revision) == (None, "good-2")
    assert world.registry.resolve("x").digest == "good-2" and world.fleet.changed
    assert in_store(world) == ({"x": "good-2"}, {"good-2"}) and not world.fleet.busy


def test_steps_go_on_while_an_adapter_is_read(world: World) -> None:
    world.loader.gate.clear()
    assert world.begin_load("x", "good-2") == []
    submit(world.engine, "r", PROMPT, PARAMS)
    assert world.run()["r"] == solo("", PROMPT, PARAMS)
    assert world.fleet.busy and "x" not in world.registry.adapters
    world.loader.gate.set()
    assert world.until_replied().revision == "good-2"


@pytest.mark.parametrize(
    ("name", "path", "code"),
    [
        ("x", "bad", "not_finite"),
        ("x", "good-99", "adapter_too_large"),
        ("x", "nothing", "path_refused"),
        ("x", "n" * 5000, "path_refused"),
        ("base", "good-2", "name_refused"),
        ("old", "good-2", "adapter_exists"),
    ],
)
def test_a_refused_load_changes_nothing(name: str, path: str, code: str, world: World) -> None:
    world.load("old", "good-3")
    assert world.load(name, path).code == code
    assert {n: r.digest for n, r in world.registry.adapters.items()} == {"old": "good-3"}
    assert known(world.engine) == ["good-3"] and not world.fleet.busy


def test_a_path_outside_the_roots_is_refused_even_through_a_link(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside") / "good-2"
    outside.mkdir()
    (world.root / "link").symlink_to(outside)
    for path in ("link", "..", str(outside)):
        assert world.load("x", path).code == "path_refused"


def test_what_was_fetched_is_loaded_only_from_where_it_is_fetched_to(world: World) -> None:
    write_adapter(world.root / "fetched" / "claim", "good-2")
    for path in ("good-2", "fetched/../good-2", "nothing"):
        fields = {"name": "x", "path": str(world.root / path), "source": "s3://bucket/x"}
        assert world.do(LoadAdapter, **fields).code == "path_refused"
    fields["path"] = str(world.root / "fetched" / "claim")
    assert world.do(LoadAdapter, **fields).revision == "good-2"
    assert world.registry.resolve("x").revision.source == "s3://bucket/x"


def test_a_second_load_of_a_name_on_its_way_is_refused(world: World) -> None:
    world.loader.gate.clear()
    world.begin_load("x", "good-2")
    (refused,) = world.begin_load("x", "good-3")
    assert refused.code == "adapter_loading"
    world.loader.gate.set()
    assert world.until_replied().revision == "good-2"


def test_a_request_keeps_the_revision_it_began_with(world: World) -> None:
    world.load("x", "good-2")
    world.ask("before", "x")
    world.step()
    assert world.load("x", "good-3", in_place=True).revision == "good-3"
    world.ask("after", "x")
    assert known(world.engine) == ["good-2", "good-3"]
    tokens = world.run()
    assert tokens["before"] == solo("good-2", PROMPT, PARAMS)
    assert tokens["after"] == solo("good-3", PROMPT, PARAMS)
    world.fleet.turn()
    assert known(world.engine) == ["good-3"]
    assert list(world.worker.images.values()) == ["good-3"]


def test_an_unloaded_revision_is_forgotten_with_its_last_request(world: World) -> None:
    world.load("x", "good-2")
    world.ask("r", "x")
    world.step()
    assert world.unload("x").code is None
    with pytest.raises(ValueError, match="does not exist"):
        world.registry.resolve("x")
    assert world.run()["r"] == solo("good-2", PROMPT, PARAMS)
    world.fleet.turn()
    assert known(world.engine) == [] and world.worker.images == {}
    assert world.engine.stats().gauges["pages_adapters"] == 0
    assert in_store(world) == ({}, set()) and world.unload("x").code == "adapter_not_found"


def test_what_was_computed_with_a_revision_goes_with_it(world: World) -> None:
    for name, adapter in (("x", "good-2"), ("y", "good-3")):
        world.load(name, adapter)
        world.ask(name, name)
    world.run()
    cached = world.engine.stats().gauges["pages_cached"]
    world.unload("x")
    world.settle()
    assert 0 < world.engine.stats().gauges["pages_cached"] < cached, "that of y stays"
    world.unload("y")
    world.settle()
    assert world.engine.stats().gauges["pages_cached"] == 0


def test_a_revision_stays_while_another_name_means_it(world: World) -> None:
    world.load("x", "good-2")
    assert world.load("y", "good-2").revision == "good-2"
    world.unload("x")
    world.fleet.turn()
    assert known(world.engine) == ["good-2"]
    world.ask("r", "y")
    assert world.run()["r"] == solo("good-2", PROMPT, PARAMS)


def test_a_revision_that_is_named_again_while_it_drains_stays(world: World) -> None:
    world.load("x", "good-2")
    world.ask("r", "x")
    world.step()
    world.unload("x")
    world.loader.gate.clear()
    world.begin_load("z", "good-2")
    world.run()
    world.loader.gate.set()
    assert world.until_replied().revision == "good-2"
    world.ask("again", "z")
    assert world.run()["again"] == solo("good-2", PROMPT, PARAMS)


def test_a_move_without_a_store_is_refused(forgetful: World) -> None:
    forgetful.load("x", "good-2")
    for revision in ("good-3", None):
        assert forgetful.move("x", revision).code == "no_store"
    assert forgetful.push("x", "good-4").code == "no_store"
    assert not [*(forgetful.root / "spool").iterdir()]
    assert forgetful.registry.resolve("x").digest == "good-2"


def test_a_revision_is_named_by_its_first_digits_among_those_of_its_name(world: World) -> None:
    first, second, others = "0123456789abc-2", "0123456789abd-2", "abcdef0123456-2"
    for name, adapter in (("x", first), ("x", second), ("y", others)):
        write_adapter(world.root / adapter, adapter)
        world.load(name, adapter, in_place=True)
    assert world.move("x", None).revision == first
    assert world.move("x", second[:13]).revision == second, "it was rolled back"
    assert world.move("x", first[:13]).revision == first
    for text, code, reason in (
        (first[:12], "ambiguous_revision", f"may be each of {first}, {second}"),
        (first[:11], "unknown_revision", "must be a digest or at least its first 12 digits"),
        ("", "unknown_revision", "at least its first 12 digits"),
        (others[:13], "unknown_revision", "adapter 'x' has had none that begins so"),
        ("%" * 12, "unknown_revision", "is not in the store"),
    ):
        refused = world.move("x", text)
        assert (refused.code, reason in refused.message) == (code, True), refused.message
    assert world.registry.resolve("x").digest == first
    assert world.move("x", others).revision == others, "by its whole digest, whosever it was"


def test_the_list_tells_what_is_resident_and_in_use(world: World) -> None:
    for name, path in (("b", "good-2"), ("a", "good-3"), ("c", "good-2")):
        world.load(name, path)
    for request_id in ("r1", "r2"):
        world.ask(request_id, "b")
    world.step()
    calls = [
        ListAdapters(call_id="all"),
        ListAdapters(call_id="page", after="a", limit=1),
        ListAdapters(call_id="one", name="c"),
        ListAdapters(call_id="none", name="d"),
    ]
    for call in calls:
        assert world.fleet.handle(call) == []
    found: dict[str, AdapterList] = {}
    while len(found) < len(calls):
        found |= {m.call_id: m for m in world.fleet.turn() if isinstance(m, AdapterList)}
    shown = [
        (each.name, each.revision, each.pages, each.resident, each.requests)
        for each in found["all"].adapters
    ]
    assert shown == [
        ("a", "good-3", 3, False, 0),
        ("b", "good-2", 2, True, 2),
        ("c", "good-2", 2, True, 2),
    ]
    assert [each.name for each in found["page"].adapters] == ["b"]
    assert [each.name for each in found["one"].adapters] == ["c"]
    assert found["none"].adapters == [] and found["all"].adapters[1].history == ["good-2"]


def test_requests_that_take_too_long_are_ended_and_told(hasty: World) -> None:
    hasty.load("x", "good-2")
    hasty.ask("r", "x")
    submit(hasty.engine, "base", PROMPT, PARAMS)
    hasty.step()
    hasty.begin(UnloadAdapter, name="x")
    (failed,) = (m for m in hasty.fleet.turn() if isinstance(m, Failed))
    assert (failed.request_id, failed.code) == ("r", "adapter_unloaded")
    assert known(hasty.engine) == []
    assert hasty.run()["base"] == solo("", PROMPT, PARAMS)


def test_a_name_that_goes_takes_all_its_revisions_along(world: World) -> None:
    world.load("x", "good-2")
    world.load("x", "good-3", in_place=True)
    world.load("y", "good-3")
    assert in_store(world)[1] == {"good-2", "good-3"}
    world.move("x", None)
    world.ask("r", "x")
    world.unload("x")
    assert in_store(world)[1] == {"good-2", "good-3"}, "a request runs with good-2"
    world.run()
    world.settle()
    assert in_store(world) == ({"y": "good-3"}, {"good-3"}) and known(world.engine) == ["good-3"]


def test_what_is_refused_after_it_was_read_leaves_nothing(world: World) -> None:
    assert world.load("x", "good-99").code == "adapter_too_large"
    world.settle()
    assert in_store(world) == ({}, set()) and known(world.engine) == []


def test_a_revision_that_comes_again_while_it_goes_stays_in_the_store(world: World) -> None:
    world.load("x", "good-2")
    world.loader.gate.clear()
    world.begin_load("y", "good-2")
    world.unload_begun("x")
    world.loader.gate.set()
    world.settle()
    assert in_store(world) == ({"y": "good-2"}, {"good-2"}) and known(world.engine) == ["good-2"]
