"""Everything that may be asked of a fleet, at random and at once: in the end its books agree."""

import random
import time
from pathlib import Path

import pytest

from tests.engine.fake import solo
from tests.engine.fleet_world import PARAMS, PROMPT, World, known, world_at, write_adapter
from tp_engine.adapters import ModelHeld, UnknownModel
from tp_engine.messages import (
    AdapterReply,
    DrainAdapter,
    FlushAdapters,
    ListAdapters,
    LoadAdapter,
    MoveAdapter,
    PinAdapter,
    PreloadAdapter,
    PushAdapter,
    ResumeAdapter,
    UnloadAdapter,
)
from tp_engine.requests.admission import RequestError

NAMES = ("a", "b", "c", "d")
ADAPTERS = tuple(f"good-{pages}" for pages in range(2, 9))
STEPS = 300
REFUSALS = {
    *("adapter_exists", "adapter_loading", "adapter_not_found", "nothing_before"),
    *("unknown_name", "unknown_revision", "no_room", "adapter_too_large"),
}


def call_at_random(world: World, rng: random.Random) -> list[AdapterReply]:
    name, adapter = rng.choice(NAMES), rng.choice(ADAPTERS)
    path = str(world.root / adapter)
    match rng.choice(["load", "push", "push", "move", "back", "unload", "name", "flush", "look"]):
        case "load":
            in_place = rng.random() < 0.7
            return world.begin(LoadAdapter, name=name, path=path, in_place=in_place)
        case "push":
            return world.begin(PushAdapter, name=name, directory=str(world.spool(adapter)))
        case "move":
            return world.begin(MoveAdapter, name=name, revision=adapter)
        case "back":
            return world.begin(MoveAdapter, name=name, revision=None)
        case "unload":
            return world.begin(UnloadAdapter, name=name)
        case "flush":
            return world.begin(FlushAdapters, name=rng.choice([None, name]))
        case "look":
            return world.begin(ListAdapters, name=rng.choice([None, name]))
    if rng.random() < 0.3:
        return world.begin(PinAdapter, name=name, pinned=rng.random() < 0.5)
    if rng.random() < 0.3:
        return world.begin(PreloadAdapter, name=name, arena=rng.random() < 0.5)
    if rng.random() < 0.75:
        return world.begin(ResumeAdapter, name=name)
    seconds = rng.choice([0.0, 0.05, 60.0, 60.0])
    return world.begin(DrainAdapter, name=name, seconds=seconds, remove=rng.random() < 0.3)


class Traffic:
    """Requests, and what each of them must say."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.wanted: dict[str, str] = {}
        self.ended: set[str] = set()

    def ask(self) -> None:
        request_id, name = f"r{len(self.wanted)}", self.rng.choice(NAMES)
        try:
            self.wanted[request_id] = self.world.fleet.admit(name)
            self.world.ask(request_id, name)
        except (UnknownModel, ModelHeld, RequestError):
            self.wanted.pop(request_id, None)

    def abort(self) -> None:
        if self.world.engine.requests:
            request_id = self.rng.choice(list(self.world.engine.requests))
            self.world.engine.abort(request_id)
            self.ended.add(request_id)

    def step(self) -> None:
        failed = self.world.step()
        assert {each.code for each in failed} <= {"adapter_unloaded", "adapter_draining"}
        self.ended |= {each.request_id for each in failed}

    def check(self) -> int:
        """Every output that was not ended is right; how many."""
        whole = self.wanted.keys() - self.ended
        for request_id in whole:
            right = solo(self.wanted[request_id], PROMPT, PARAMS)
            assert self.world.tokens[request_id] == right, request_id
        for request_id in self.ended:
            right = solo(self.wanted[request_id], PROMPT, PARAMS)
            said = self.world.tokens.get(request_id, [])
            assert said == right[: len(said)], request_id
        return len(whole)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("host_pages", [1000, 14])
def test_whatever_is_asked_the_books_agree_in_the_end(
    seed: int, host_pages: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    for adapter in ADAPTERS:
        if not (tmp_path / adapter).exists():
            write_adapter(tmp_path / adapter, adapter)
    options = {"drain_timeout": 0.2, "flush_interval": 0.03, "host_pages": host_pages}
    with world_at(tmp_path, **options) as world:
        traffic = Traffic(world, rng)
        for _ in range(STEPS):
            if rng.random() < 0.3:
                world.replies += call_at_random(world, rng)
            if rng.random() < 0.4:
                traffic.ask()
            if rng.random() < 0.05:
                traffic.abort()
            if rng.random() < 0.2:
                time.sleep(0.002)  # for the other threads
            traffic.step()
        deadline = time.monotonic() + 20
        while world.engine.requests or world.fleet.busy or not world.fleet.put_away():
            assert time.monotonic() < deadline
            traffic.step()
        assert traffic.check() > 0
        assert {reply.code for reply in world.replies} - {None} <= REFUSALS
        assert world.fleet.unsaved == []
        check_books(world)
        means = {name: each.digest for name, each in world.registry.adapters.items()}
        held = set(world.registry.held)
    with world_at(tmp_path, **options) as world:
        again = {name: each.digest for name, each in world.registry.adapters.items()}
        assert (again, set(world.registry.held)) == (means, held), "after a restart too"
        for name in list(means):
            assert world.unload(name).code is None
        world.settle()
        assert known(world.engine) == [] and files(world) == set()


def check_books(world: World) -> None:
    """What names mean, what the store has, what the ranks have: one and the same."""
    world.reader_idle()
    assert world.store is not None
    named = {name: each.digest for name, each in world.registry.adapters.items()}
    assert {alias.name: alias.digest for alias in world.store.aliases()} == named
    assert {alias.name for alias in world.store.aliases() if alias.hold} == world.registry.held
    assert set(known(world.engine)) == set(named.values())
    assert set(world.worker.images.values()) <= set(named.values())
    past = {move.digest for name in named for move in world.store.moves(name)}
    assert past <= files(world) and set(named.values()) <= past
    assert not [*(world.root / "spool").iterdir()], "all that was pushed is written or gone"
    assert world.engine.check_integrity() == []


def files(world: World) -> set[str]:
    world.reader_idle()
    return {path.name for path in (world.root / "store" / "revisions").iterdir()}
