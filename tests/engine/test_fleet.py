"""The fleet over a fake engine: what happens when, without processes or files."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.fake import LAYOUT, FakeImage, make_engine, solo, submit
from tp_engine.adapters import AdapterError, AdapterRegistry
from tp_engine.adapters.store import StoreError
from tp_engine.engine import Engine
from tp_engine.fleet import AdapterFleet
from tp_engine.messages import (
    AdapterList,
    AdapterReply,
    Failed,
    ListAdapters,
    LoadAdapter,
    Message,
    MoveAdapter,
    Output,
    UnloadAdapter,
)
from tp_engine.params import SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


class FakeLoader:
    """An adapter is its directory's name: ``good-3`` has 3 pages, ``bad`` is refused."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.names: dict[str, str] = {}

    def load(self, directory: Path) -> Any:
        assert self.gate.wait(10)
        name = directory.name
        if name.startswith("bad"):
            raise AdapterError("not_finite", f"{name} has a NaN")
        pages = int(name.split("-")[1])
        revision = SimpleNamespace(
            digest=name, max_rank=4, traits=0, source=name, applied=1, expected=1, warnings=()
        )
        image = FakeImage(
            name=name,
            pages=torch.zeros((pages, LAYOUT.page_bytes), dtype=torch.uint8),
            record=torch.zeros(8, dtype=torch.int64),
        )
        return revision, [image]

    def record(self, name: str, digest: str) -> None:
        self.names[name] = digest

    def load_kept(self, name: str, digest: str | None) -> Any:
        raise StoreError("no_store", "nothing is kept here")

    def roll_back(self, name: str, digest: str) -> None:
        raise NotImplementedError

    def history(self, name: str) -> list[str]:
        return [self.names[name]]

    def erase(self, name: str) -> None:
        self.names.pop(name, None)


class World:
    """An engine, its fleet, and a clock's patience."""

    def __init__(self, root: Path, drain_timeout: float) -> None:
        for name in ("good-2", "good-3", "good-99", "bad"):
            (root / name).mkdir()
        self.root = root
        self.engine, self.worker = make_engine()
        self.registry = AdapterRegistry(["base"])
        self.loader = FakeLoader()
        self.fleet = AdapterFleet(
            self.engine, self.registry, self.loader, roots=[root], drain_timeout=drain_timeout
        )
        self.calls = 0
        self.tokens: dict[str, list[int]] = {}

    def load(self, name: str, path: str, *, in_place: bool = False) -> AdapterReply:
        """A whole load."""
        return self.until_answered(*self.begin(name, path, in_place=in_place))

    def begin(self, name: str, path: str, *, in_place: bool = False) -> list[AdapterReply]:
        self.calls += 1
        call = LoadAdapter(
            call_id=str(self.calls), name=name, path=str(self.root / path), in_place=in_place
        )
        return self.fleet.handle(call)

    def unload(self, name: str) -> AdapterReply:
        return self.until_answered(*self.fleet.handle(UnloadAdapter(call_id="u", name=name)))

    def until_answered(self, *replies: Message) -> AdapterReply:
        """Turns without steps, until the one open call is answered."""
        found = list(replies)
        deadline = time.monotonic() + 10
        while not found:
            assert time.monotonic() < deadline
            found = [m for m in self.fleet.turn() if isinstance(m, AdapterReply)]
        (reply,) = found
        assert isinstance(reply, AdapterReply)
        return reply

    def step(self) -> None:
        """One step and one turn."""
        for output in [*self.engine.step(), *self.fleet.turn()]:
            if isinstance(output, Output):
                self.tokens.setdefault(output.request_id, []).extend(output.tokens)

    def run(self) -> dict[str, list[int]]:
        """All open requests to their ends: the tokens of all there ever were."""
        while self.engine.requests:
            self.step()
        return self.tokens


def world_of(tmp_path: Path, drain_timeout: float = 60.0) -> Iterator[World]:
    world = World(tmp_path, drain_timeout)
    yield world
    world.fleet.close()
    assert world.engine.check_integrity() == []


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    yield from world_of(tmp_path)


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[World]:
    yield from world_of(tmp_path, drain_timeout=0.0)


def ask(world: World, request_id: str, name: str) -> None:
    revision = world.registry.resolve(name).revision
    submit(world.engine, request_id, [5, 6, 7], PARAMS, revision)


def known(engine: Engine) -> list[str]:
    return sorted(engine.adapters)


def test_a_load_moves_the_name_when_all_ranks_have_it(world: World) -> None:
    reply = world.load("x", "good-2")
    assert (reply.code, reply.revision) == (None, "good-2")
    assert world.registry.resolve("x").digest == "good-2" and world.fleet.changed
    assert world.loader.names == {"x": "good-2"} and not world.fleet.busy


def test_steps_go_on_while_an_adapter_is_read(world: World) -> None:
    world.loader.gate.clear()
    assert world.begin("x", "good-2") == []
    submit(world.engine, "r", [5, 6, 7], PARAMS)
    assert world.run()["r"] == solo("", [5, 6, 7], PARAMS)
    assert world.fleet.busy and "x" not in world.registry.adapters
    world.loader.gate.set()
    assert world.until_answered().revision == "good-2"


@pytest.mark.parametrize(
    ("name", "path", "code"),
    [
        ("x", "bad", "not_finite"),
        ("x", "good-99", "adapter_too_large"),
        ("x", "nothing", "path_refused"),
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


def test_a_second_load_of_a_name_on_its_way_is_refused(world: World) -> None:
    world.loader.gate.clear()
    world.begin("x", "good-2")
    (refused,) = world.begin("x", "good-3")
    assert refused.code == "adapter_loading"
    world.loader.gate.set()
    assert world.until_answered().revision == "good-2"


def test_a_request_keeps_the_revision_it_began_with(world: World) -> None:
    world.load("x", "good-2")
    ask(world, "before", "x")
    world.step()
    assert world.load("x", "good-3", in_place=True).revision == "good-3"
    ask(world, "after", "x")
    assert known(world.engine) == ["good-2", "good-3"]
    tokens = world.run()
    assert tokens["before"] == solo("good-2", [5, 6, 7], PARAMS)
    assert tokens["after"] == solo("good-3", [5, 6, 7], PARAMS)
    world.fleet.turn()
    assert known(world.engine) == ["good-3"]
    assert list(world.worker.images.values()) == ["good-3"]


def test_an_unloaded_revision_is_forgotten_with_its_last_request(world: World) -> None:
    world.load("x", "good-2")
    ask(world, "r", "x")
    world.step()
    assert world.unload("x").code is None
    with pytest.raises(ValueError, match="does not exist"):
        world.registry.resolve("x")
    assert world.run()["r"] == solo("good-2", [5, 6, 7], PARAMS)
    world.fleet.turn()
    assert known(world.engine) == [] and world.worker.images == {}
    assert world.engine.stats().gauges["pages_adapters"] == 0
    assert world.loader.names == {} and world.unload("x").code == "adapter_not_found"


def test_a_revision_stays_while_another_name_means_it(world: World) -> None:
    world.load("x", "good-2")
    assert world.load("y", "good-2").revision == "good-2"
    world.unload("x")
    world.fleet.turn()
    assert known(world.engine) == ["good-2"]
    ask(world, "r", "y")
    assert world.run()["r"] == solo("good-2", [5, 6, 7], PARAMS)


def test_a_revision_that_is_named_again_while_it_drains_stays(world: World) -> None:
    world.load("x", "good-2")
    ask(world, "r", "x")
    world.step()
    world.unload("x")
    world.loader.gate.clear()
    world.begin("z", "good-2")
    world.run()
    world.loader.gate.set()
    assert world.until_answered().revision == "good-2"
    ask(world, "again", "z")
    assert world.run()["again"] == solo("good-2", [5, 6, 7], PARAMS)


def test_a_move_without_a_store_is_refused(world: World) -> None:
    world.load("x", "good-2")
    for revision in ("good-3", None):
        replies = world.fleet.handle(MoveAdapter(call_id="m", name="x", revision=revision))
        assert world.until_answered(*replies).code == "no_store"
    assert world.registry.resolve("x").digest == "good-2"


def test_the_list_tells_what_is_resident_and_in_use(world: World) -> None:
    for name, path in (("b", "good-2"), ("a", "good-3"), ("c", "good-2")):
        world.load(name, path)
    for request_id in ("r1", "r2"):
        ask(world, request_id, "b")
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
    ask(hasty, "r", "x")
    submit(hasty.engine, "base", [5, 6, 7], PARAMS)
    hasty.step()
    hasty.fleet.handle(UnloadAdapter(call_id="u", name="x"))
    (failed,) = (m for m in hasty.fleet.turn() if isinstance(m, Failed))
    assert (failed.request_id, failed.code) == ("r", "adapter_unloaded")
    assert known(hasty.engine) == []
    assert hasty.run()["base"] == solo("", [5, 6, 7], PARAMS)
