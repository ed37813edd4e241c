"""A process that is killed at any step from source to name leaves what the next one can use."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.sources.web import CONFIG, WEIGHTS, adapter_bytes
from tp_engine.adapters import AdapterRevision, LoraModule
from tp_engine.adapters.store import AdapterStore
from tp_engine.sources import FetchArea, FetchLimits, FetchProgress, fetch, partial
from tp_engine.sources.errors import SourceBroken
from tp_engine.sources.source import RemoteFile

CONTENT = adapter_bytes(size=40_000)
URL = "s3://bucket/x"
MODULE = LoraModule(a=torch.zeros(2, 4), b=torch.zeros(4, 2), scale=1.0)
REVISION = AdapterRevision(digest="ab" * 32, source=URL, modules={(0, 0): MODULE}, expected=1)


class Memory:
    """A source that breaks once in the middle of the weights."""

    def __init__(self, breaks: int) -> None:
        self.breaks = breaks
        self.first: int | None = None
        """Where the first read of the weights began."""

    def stat(self, name: str) -> RemoteFile:
        return RemoteFile(name=name, size=len(CONTENT[name]), tag="1")

    @contextmanager
    def blocks(self, file: RemoteFile, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        if file.name == WEIGHTS and self.first is None:
            self.first = offset
        yield offset, self._read(file, offset)

    def _read(self, file: RemoteFile, offset: int) -> Iterator[bytes]:
        for start in range(offset, file.size, 4096):
            if self.breaks and start > 20_000:
                self.breaks -= 1
                raise SourceBroken("reset")
            yield CONTENT[file.name][start : min(start + 4096, file.size)]

    def close(self) -> None:
        """Nothing."""


def open_store(root: Path) -> AdapterStore:
    return AdapterStore(root, base_digest="base", architecture="LlamaForCausalLM", vocab_size=128)


def check_files(directory: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        assert (directory / name).read_bytes() == CONTENT[name]


def bring(root: Path, source: Memory) -> None:
    """The whole way: fetched, kept, named."""
    claim = FetchArea(root).claim(URL)
    fetch(source, claim, FetchLimits(max_bytes=10**6, pause=0.0), FetchProgress(), {})
    check_files(claim.path)
    store = open_store(root)
    store.add(claim.path, lambda _: REVISION, source=URL)
    store.promote("x", REVISION.digest)
    store.close()
    claim.release(keep=False)


def check_store(root: Path) -> None:
    """A name means a whole revision, or there is none."""
    store = open_store(root)
    for alias in store.aliases():
        assert (alias.name, alias.digest) == ("x", REVISION.digest)
        check_files(store.directory(alias.digest))
    known = {row.manifest.digest for row in store.revisions()}
    assert {path.name for path in (root / "revisions").iterdir()} == known
    store.close()


def kill_at(count: int) -> None:
    """Let this process be killed before its ``count``-th change of the disk that may matter."""
    left = count

    def before(function: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return called

    # What was written outlasts the process without a wait for the disk.
    os.fsync = before(lambda descriptor: None)  # type: ignore[assignment]
    for name in ("rename", "unlink", "mkdir", "rmdir"):
        setattr(os, name, before(getattr(os, name)))


def test_a_kill_at_any_step_leaves_what_can_be_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "SYNC_BYTES", 10_000)
    resumed = 0
    for count in range(1, 200):
        root = tmp_path / str(count)
        child = os.fork()
        if child == 0:
            try:
                kill_at(count)
                bring(root, Memory(breaks=1))
            except BaseException:
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        check_store(root)
        source = Memory(breaks=0)
        bring(root, source)
        check_store(root)
        resumed += (source.first or 0) > 0
        assert not [*(root / "fetching" / "claims").iterdir()]
        assert not [*(root / "fetching" / "idle").iterdir()]
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert count > 35, "there are fewer steps than there must be"
    assert resumed >= 8, "what was there is fetched again"
