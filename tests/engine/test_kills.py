"""The process is killed at many moments of a fleet's life: nothing acknowledged is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.adapters.test_store import kill_at
from tests.engine.fake import solo
from tests.engine.fleet_world import PARAMS, PROMPT, World, open_store, world_at
from tp_engine.adapters.store import RevisionState
from tp_engine.messages import DrainAdapter, Message

STRIDE = 7
"""Every seventh change of the disk; the store's own test takes each."""
Meanings = dict[str, str]
STEPS: list[tuple[str, Meanings]] = [
    ("", {}),
    ("load x", {"x": "good-2"}),
    ("load y", {"x": "good-2", "y": "good-3"}),
    ("replace x", {"x": "good-19", "y": "good-3"}),
    ("push x", {"x": "good-19", "y": "good-3"}),  # served, and not promised to last
    ("flush x", {"x": "good-4", "y": "good-3"}),
    ("roll x back", {"x": "good-19", "y": "good-3"}),
    ("promote x", {"x": "good-4", "y": "good-3"}),
    ("promote y", {"x": "good-4", "y": "good-19"}),
    ("refuse y", {"x": "good-4", "y": "good-19"}),
    ("delete y", {"x": "good-4"}),
    ("push z", {"x": "good-4"}),
    ("flush all", {"x": "good-4", "z": "good-5"}),
    ("delete x", {"z": "good-5"}),
    ("drain z away", {}),  # a request is open: it goes when the next process starts
    ("load w", {"w": "good-3"}),
]
"""What is done, and what the names mean from then on."""


def drain_away(world: World, name: str) -> Message:
    """A name that goes when its last request has ended, which never does here."""
    world.ask("open", name)
    return world.do(DrainAdapter, name=name, seconds=60.0, remove=True)


def live(world: World, say: int) -> None:
    """All of it; each acknowledgement is one line on a pipe."""
    done = {
        "load x": lambda: world.load("x", "good-2"),
        "load y": lambda: world.load("y", "good-3"),
        "replace x": lambda: world.load("x", "good-19", in_place=True),
        "push x": lambda: world.push("x", "good-4"),
        "flush x": lambda: world.flush("x"),
        "roll x back": lambda: world.move("x", None),
        "promote x": lambda: world.move("x", "good-4"),
        "promote y": lambda: world.move("y", "good-19"),
        "refuse y": lambda: world.load("y", "bad", in_place=True),
        "delete y": lambda: world.unload("y"),
        "push z": lambda: world.push("z", "good-5"),
        "flush all": lambda: world.flush(),
        "delete x": lambda: world.unload("x"),
        "drain z away": lambda: drain_away(world, "z"),
        "load w": lambda: world.load("w", "good-3"),
    }
    for name, _ in STEPS[1:]:
        reply = done[name]()
        assert (getattr(reply, "code", None) is None) == (name != "refuse y"), reply
        os.write(say, f"{name}\n".encode())


def check(root: Path, acknowledged: list[str]) -> None:
    """What a restart finds is what the last acknowledgement says, or the step after it."""
    at = len(acknowledged)
    assert acknowledged == [name for name, _ in STEPS[1 : at + 1]]
    store = open_store(root / "store")
    for row in store.revisions():
        assert row.state is RevisionState.READY
        store.directory(row.manifest.digest)  # checks the files against their sums
    kept = {row.manifest.digest for row in store.revisions()}
    assert {path.name for path in (root / "store" / "revisions").iterdir()} == kept
    assert not [*(root / "store" / "incoming").iterdir()]
    meanings = {alias.name: alias.digest for alias in store.aliases()}
    assert meanings in [state for _, state in STEPS[at : at + 2]], (acknowledged, meanings)
    past = {move.digest for name in meanings for move in store.moves(name, undone=True)}
    assert set(meanings.values()) <= past == kept, "what no name can come to mean is gone"
    store.close()
    with world_at(root) as world:
        assert {name: each.digest for name, each in world.registry.adapters.items()} == meanings
        for name in meanings:
            world.ask(name, name)
        tokens = world.run()
        assert tokens == {name: solo(each, PROMPT, PARAMS) for name, each in meanings.items()}
        assert world.load("later", "good-20").code is None, "and it can be used on"


def test_a_kill_at_any_moment_of_a_fleets_life_loses_nothing_acknowledged(tmp_path: Path) -> None:
    kills = 0
    for count in range(STRIDE, 2000, STRIDE):
        root = tmp_path / str(count)
        root.mkdir()
        heard, say = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                kill_at(count)
                with world_at(root) as world:
                    live(world, say)
            except BaseException:
                os._exit(1)
            os._exit(0)
        os.close(say)
        with os.fdopen(heard) as pipe:
            acknowledged = pipe.read().split("\n")[:-1]
        _, status = os.waitpid(child, 0)
        check(root, acknowledged)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0 and len(acknowledged) == len(STEPS) - 1
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        kills += 1
    assert kills >= 20, f"{kills} moments are too few to prove anything"
