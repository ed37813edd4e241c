"""The adapter store: what it keeps, what it refuses, and what a kill at any moment leaves."""

import json
import os
import shutil
import signal
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from tests.helpers.tiny_models import make_peft_adapter
from tp_engine.adapters import AdapterError, AdapterRevision, read_adapter
from tp_engine.adapters.store import AdapterStore, Alias, Hold, RevisionState, StoreError
from tp_engine.adapters.store.index import StoreIndex
from tp_engine.models.spec import ModelSpec

Read = Callable[[Path], AdapterRevision]


@pytest.fixture(scope="module")
def read(spec: ModelSpec) -> Read:
    return lambda directory: read_adapter(directory, spec)


@pytest.fixture(scope="module")
def pushed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Steps of a training loop."""
    root = tmp_path_factory.mktemp("pushed")
    return [
        make_peft_adapter(root / str(seed), model_dir, r=2, seed=seed, targets=["q_proj"])
        for seed in range(3)
    ]


@pytest.fixture(scope="module")
def adapters(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    patterns = {"q_proj": 3}
    return [
        make_peft_adapter(root / "a", model_dir, r=2, seed=1, rank_pattern=patterns, rslora=True),
        make_peft_adapter(root / "b", model_dir, r=4, seed=2, targets=["v_proj"]),
    ]


def open_store(root: Path) -> AdapterStore:
    return AdapterStore(root, base_digest="base", architecture="LlamaForCausalLM", vocab_size=128)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AdapterStore]:
    opened = open_store(tmp_path / "store")
    yield opened
    opened.close()


def test_a_manifest_tells_what_the_files_hold(
    store: AdapterStore, adapters: list[Path], read: Read
) -> None:
    revision, row = store.add(adapters[0], read)
    manifest = row.manifest
    assert row.state is RevisionState.READY and manifest.digest == revision.digest
    assert (manifest.base_digest, manifest.architecture, manifest.vocab_size) == (
        *("base", "LlamaForCausalLM", 128),
    )
    entry = manifest.modules["model.layers.1.self_attn.q_proj"]
    assert (entry.rank, entry.a, entry.b) == (3, (3, 64), (64, 3))
    module = revision.modules[1, 0]
    assert entry.scale == module.scale and entry.dtype == str(module.a.dtype).split(".")[1]
    assert manifest.applied == manifest.expected == len(manifest.modules) == 14
    assert manifest.replaced == {}
    assert manifest.tensor_bytes == revision.nbytes < manifest.file_bytes
    assert manifest.source == str(adapters[0])
    kept = read(store.directory(revision.digest))
    assert kept.digest == revision.digest
    decoded = msgspec.json.decode(msgspec.json.encode(manifest), type=type(manifest))
    assert decoded == manifest


def test_a_manifest_tells_of_the_embedding_and_the_head(
    store: AdapterStore, model_dir: Path, read: Read, tmp_path: Path
) -> None:
    adapter = make_peft_adapter(
        tmp_path / "ends",
        model_dir,
        targets=["lm_head"],
        modules_to_save=["embed_tokens"],
    )
    _, row = store.add(adapter, read)
    manifest = row.manifest
    assert [*manifest.modules] == ["lm_head"] and manifest.modules["lm_head"].rank == 4
    assert manifest.applied == manifest.expected == 2
    (entry,) = manifest.replaced.values()
    assert [*manifest.replaced] == ["model.embed_tokens"]
    assert (entry.whole, entry.rows, entry.dtype) == (True, 0, "float32")


def test_everything_is_there_after_a_restart(
    tmp_path: Path, adapters: list[Path], read: Read
) -> None:
    store = open_store(tmp_path)
    digests = [store.add(path, read)[0].digest for path in adapters]
    store.promote("x", digests[0])
    store.promote("x", digests[1])
    store.promote("y", digests[1])
    store.pin("y", True)
    store.hold("y", Hold.HELD)
    before = store.revisions(), store.aliases(), store.moves("x")
    store.close()
    store = open_store(tmp_path)
    assert (store.revisions(), store.aliases(), store.moves("x")) == before
    assert store.alias("y") == Alias(name="y", digest=digests[1], pinned=True, hold=Hold.HELD)
    assert [row.manifest.digest for row in store.revisions()] == sorted(digests)
    store.close()


def test_names_move_and_are_rolled_back_move_by_move(
    store: AdapterStore, adapters: list[Path], read: Read
) -> None:
    a, b = (store.add(path, read)[0].digest for path in adapters)
    for digest in (a, b, a):
        store.promote("x", digest)
    assert [move.digest for move in store.moves("x")] == [a, b, a]
    assert store.roll_back("x").digest == b
    assert store.roll_back("x").digest == a
    with pytest.raises(StoreError, match="'x' has no earlier revision"):
        store.roll_back("x")
    assert store.alias("x").digest == a


def test_a_name_never_moves_to_a_revision_that_cannot_be_served(
    store: AdapterStore, adapters: list[Path], read: Read
) -> None:
    a, b = (store.add(path, read)[0].digest for path in adapters)
    store.promote("x", a)
    store.promote("x", b)
    with (store.directory(a) / "adapter_model.safetensors").open("ab") as file:
        file.write(b"!")
    with pytest.raises(StoreError, match="SHA-256"):
        store.directory(a)
    moves: list[Callable[[], object]] = [
        lambda: store.promote("x", a),
        lambda: store.roll_back("x"),
    ]
    for move in moves:
        with pytest.raises(StoreError, match=f"revision {a} is failed"):
            move()
    with pytest.raises(StoreError, match="'nope' is not registered"):
        store.promote("x", "nope")
    assert store.alias("x").digest == b


def test_what_was_rolled_back_can_be_promoted_until_the_name_moves_on(
    store: AdapterStore, adapters: list[Path], pushed: list[Path], read: Read
) -> None:
    a, b, c = (store.add(path, read)[0].digest for path in [*adapters, pushed[0]])
    store.promote("x", a)
    store.promote("x", b)
    store.roll_back("x")
    assert store.promote("x", b) == []
    assert [move.digest for move in store.moves("x")] == [b, a]
    store.roll_back("x")
    assert store.promote("x", c) == [b]
    assert store.revision(b).state is RevisionState.DRAINING
    assert store.directory(b).exists(), "requests may still need it"
    store.promote("y", b)
    store.discard(b)
    assert store.revision(b).state is RevisionState.READY, "it was named again"
    store.unname("y")
    directory = store.directory(b)
    store.discard(b)
    assert not directory.exists()
    with pytest.raises(StoreError, match="is not registered"):
        store.directory(b)
    with pytest.raises(StoreError, match="'y' is not registered"):
        store.unname("y")


def test_pushes_are_one_move_and_the_last_of_them_lasts(
    store: AdapterStore, adapters: list[Path], pushed: list[Path], read: Read
) -> None:
    a = store.add(adapters[0], read)[0].digest
    first, second, third = (store.add(path, read)[0].digest for path in pushed)
    store.promote("x", a)
    assert store.promote("x", first, pushed=True) == []
    assert store.promote("x", second, pushed=True) == [first]
    assert [(move.digest, move.pushed) for move in store.moves("x")] == [(second, True), (a, False)]
    assert store.promote("x", second) == [], "what a checkpoint is made of"
    assert store.promote("x", third, pushed=True) == []
    assert [move.digest for move in store.moves("x")] == [third, second, a]
    assert store.roll_back("x").digest == second
    assert store.roll_back("x").digest == a


def test_a_name_that_goes_leaves_nothing_that_no_other_refers_to(
    tmp_path: Path, adapters: list[Path], pushed: list[Path], read: Read
) -> None:
    store = open_store(tmp_path / "mine")
    a, b, c = (store.add(path, read)[0].digest for path in [*adapters, pushed[0]])
    for name, digest in (("x", a), ("x", b), ("y", b), ("y", c)):
        store.promote(name, digest)
    store.roll_back("y")
    assert store.unname("x") == [a]
    store.discard(b)
    assert {row.manifest.digest for row in store.revisions()} == {a, b, c}
    store.close()
    store = open_store(tmp_path / "mine")
    assert {row.manifest.digest for row in store.revisions()} == {b, c}
    for digest in store.unname("y"):
        store.discard(digest)
    assert not store.revisions() and not [*(tmp_path / "mine" / "revisions").iterdir()]
    store.close()


def test_what_is_refused_leaves_nothing(store: AdapterStore, tmp_path: Path, read: Read) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "adapter_config.json").write_text("{}")
    (broken / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(AdapterError):
        store.add(broken, read)
    with pytest.raises(FileNotFoundError):
        store.add(tmp_path / "nothing", read)
    assert not store.revisions()
    assert not [*(tmp_path / "store" / "incoming").iterdir()]
    assert not [*(tmp_path / "store" / "revisions").iterdir()]


def test_what_was_checked_is_what_is_kept(
    store: AdapterStore, tmp_path: Path, adapters: list[Path], read: Read
) -> None:
    moving = tmp_path / "moving"
    shutil.copytree(adapters[0], moving)

    def read_while_it_changes(directory: Path) -> AdapterRevision:
        revision = read(directory)
        shutil.copytree(adapters[1], moving, dirs_exist_ok=True)
        return revision

    revision, _ = store.add(moving, read_while_it_changes)
    assert read(store.directory(revision.digest)).digest == revision.digest


def test_the_same_content_is_kept_once(
    store: AdapterStore, tmp_path: Path, adapters: list[Path], read: Read
) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(adapters[0], copied)
    config = json.loads((copied / "adapter_config.json").read_text())
    (copied / "adapter_config.json").write_text(json.dumps({**config, "inference_mode": False}))
    rows = [store.add(path, read)[1] for path in (adapters[0], copied)]
    assert rows[0] == rows[1] and len(store.revisions()) == 1


@pytest.mark.parametrize("damage", ["bits", "short", "gone"])
def test_damaged_files_are_found_and_can_be_registered_again(
    damage: str, tmp_path: Path, adapters: list[Path], read: Read
) -> None:
    store = open_store(tmp_path)
    digest = store.add(adapters[0], read)[0].digest
    store.promote("x", digest)
    file = store.directory(digest) / "adapter_model.safetensors"
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        bad = content[:-1] + bytes([content[-1] ^ 1]) if damage == "bits" else content[:-2]
        file.write_bytes(bad)
    store.close()
    store = open_store(tmp_path)
    with pytest.raises(StoreError) as refused:
        store.directory(digest)
    assert refused.value.code == ("damaged" if damage == "bits" else "not_ready")
    assert store.revision(digest).state is RevisionState.FAILED
    store.add(adapters[0], read)
    assert (store.directory(digest) / file.name).read_bytes() == content
    assert store.alias("x").digest == digest
    store.close()


def test_many_threads_leave_one_past(store: AdapterStore, adapters: list[Path], read: Read) -> None:
    digests = [store.add(path, read)[0].digest for path in adapters]
    refused: list[str] = []

    def work(seed: int) -> None:
        for turn in range(20):
            try:
                store.add(adapters[turn % 2], read)
                store.promote("x", digests[(seed + turn) % 2])
                store.roll_back("x")
            except StoreError as error:
                refused.append(error.code)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(refused) <= {"nothing_before"}
    past = [move.digest for move in store.moves("x")]
    assert past[0] == store.alias("x").digest
    assert all(a != b for a, b in pairwise(past)), "a move that changes nothing is none"
    for digest in past:
        assert store.directory(digest).exists()


def test_names_move_while_files_are_deleted(
    store: AdapterStore, adapters: list[Path], read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, kept = (store.add(path, read)[0].digest for path in adapters)
    deleting, go_on, delete = threading.Event(), threading.Event(), shutil.rmtree

    def slowly(path: Path) -> None:
        deleting.set()
        assert go_on.wait(10)
        delete(path)

    monkeypatch.setattr(shutil, "rmtree", slowly)
    with ThreadPoolExecutor(2) as threads:
        discarded = threads.submit(store.discard, gone)
        assert deleting.wait(10)
        try:
            assert threads.submit(store.promote, "x", kept).result(5) == []
        finally:
            go_on.set()
        discarded.result()
    assert [row.manifest.digest for row in store.revisions()] == [kept]


def test_who_looks_does_not_wait_for_a_change(
    store: AdapterStore, adapters: list[Path], read: Read
) -> None:
    first, second = (store.add(path, read)[0].digest for path in adapters)
    store.promote("x", first)
    with ThreadPoolExecutor(1) as thread:
        with store._index._change() as db:
            db.execute("UPDATE aliases SET digest = ?", (second,))
            assert thread.submit(store.alias, "x").result(5).digest == first
        assert thread.submit(store.alias, "x").result(5).digest == second


def test_a_full_disk_fails_the_change_that_finds_it_alone(
    store: AdapterStore, adapters: list[Path], read: Read
) -> None:
    digest = store.add(adapters[0], read)[0].digest
    db = store._index._db
    (pages,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(OSError, match=r"index of the adapter store: .*full"):
        for number in range(1000):
            store.promote(f"{number:0200}", digest)
    before = len(store.aliases())
    db.execute("PRAGMA max_page_count = 1000000")
    store.promote("x", digest)
    assert len(store.aliases()) == before + 1


def test_another_versions_index_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    with sqlite3.connect(tmp_path / "index.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ValueError, match="schema version 99; this program reads 2"):
        open_store(tmp_path)


# --- killed at every step ------------------------------------------------------------------------


def life(root: Path, adapters: list[Path], revisions: list[AdapterRevision], say: int) -> None:
    """Everything that a store does; each acknowledgement is one line on a pipe."""
    store = open_store(root)
    by_path = dict(zip(adapters, revisions, strict=True))
    steps: list[tuple[str, Callable[[], object]]] = [
        *((f"add {i}", lambda path=p: store.add(path, lambda _: by_path[path]))
          for i, p in enumerate(adapters)),
        ("x is 0", lambda: store.promote("x", revisions[0].digest)),
        ("x is 1", lambda: store.promote("x", revisions[1].digest)),
        ("x is back", lambda: store.roll_back("x")),
        ("x is gone", lambda: store.unname("x")),
        ("discard 1", lambda: store.discard(revisions[1].digest)),
        ("add 1 again", lambda: store.add(adapters[1], lambda _: revisions[1])),
        ("x is 1 again", lambda: store.promote("x", revisions[1].digest)),
        ("push 0", lambda: store.promote("x", revisions[0].digest, pushed=True)),
        ("push 1", lambda: store.promote("x", revisions[1].digest, pushed=True)),
        ("unname", lambda: store.unname("x")),
        ("discard 0", lambda: store.discard(revisions[0].digest)),
    ]  # fmt: skip
    for name, step in steps:
        step()
        os.write(say, f"{name}\n".encode())
    store.close()


def kill_at(count: int) -> None:
    """Let this process be killed before its ``count``-th change of the disk."""
    left = count

    def tick(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(function: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: object, **options: object) -> object:
            tick()
            return function(*arguments, **options)

        return called

    # What was written outlasts the process without a wait for the disk.
    os.fsync = before(lambda descriptor: None)  # type: ignore[assignment]
    os.rename = before(os.rename)  # type: ignore[assignment]
    os.unlink = before(os.unlink)  # type: ignore[assignment]
    os.mkdir = before(os.mkdir)  # type: ignore[assignment]
    opened = StoreIndex.__init__

    def traced(self: StoreIndex, path: Path) -> None:
        opened(self, path)
        self._db.set_trace_callback(tick)

    StoreIndex.__init__ = traced  # type: ignore[method-assign]


def check(root: Path, acknowledged: list[str], digests: list[str], read: Read) -> None:
    """What is there after the last acknowledgement, or one step later."""
    store = open_store(root)
    try:
        known = {row.manifest.digest for row in store.revisions()}
        assert {path.name for path in (root / "revisions").iterdir()} == known
        assert not [*(root / "incoming").iterdir()]
        for row in store.revisions():
            if row.state is RevisionState.READY:
                assert read(store.directory(row.manifest.digest)).digest == row.manifest.digest
        zero, one = digests
        after: dict[str, tuple[set[str], str | None]] = {
            "": (set(), None),
            # The opening of a store discards what nobody refers to, as yet or any more.
            "add 0": (set(), None),
            "add 1": (set(), None),
            "x is 0": ({zero}, zero),
            "x is 1": ({zero, one}, one),
            "x is back": ({zero, one}, zero),
            "x is gone": (set(), None),
            "discard 1": (set(), None),
            "add 1 again": (set(), None),
            "x is 1 again": ({one}, one),
            "push 0": ({zero, one}, zero),
            "push 1": ({one}, one),
            "unname": (set(), None),
            "discard 0": (set(), None),
        }
        names = list(after)
        at = names.index(acknowledged[-1] if acknowledged else "")
        means = {alias.name: alias.digest for alias in store.aliases()}.get("x")
        assert (known, means) in [after[name] for name in names[at : at + 2]]
        if means is not None:
            assert store.moves("x")[0].digest == means
    finally:
        store.close()


def test_a_kill_at_any_step_loses_nothing_acknowledged(
    tmp_path: Path, adapters: list[Path], spec: ModelSpec, read: Read
) -> None:
    revisions = [replace(read(path), source="elsewhere") for path in adapters]
    digests = [revision.digest for revision in revisions]
    for count in range(1, 400):
        root = tmp_path / str(count)
        heard, say = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                kill_at(count)
                life(root, adapters, revisions, say)
            except BaseException:
                os._exit(1)
            os._exit(0)
        os.close(say)
        with os.fdopen(heard) as pipe:
            acknowledged = pipe.read().split("\n")[:-1]
        _, status = os.waitpid(child, 0)
        check(root, acknowledged, digests, read)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0 and len(acknowledged) == 13
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert count > 60, "there are fewer steps than the store must have"
