"""A fleet over a fake engine and a real store: what happens when, without processes or models."""

import itertools
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.engine.fake import LAYOUT, FakeImage, make_engine, submit
from tp_engine.adapters import AdapterError, AdapterRegistry, AdapterRevision, LoraModule
from tp_engine.adapters.store import AdapterStore
from tp_engine.engine import Engine
from tp_engine.fleet import AdapterFleet, AdapterLoader, StartingAdapters
from tp_engine.messages import (
    AdapterCall,
    AdapterList,
    AdapterReply,
    AdaptersFlushed,
    AdapterStatus,
    Failed,
    FlushAdapters,
    ListAdapters,
    LoadAdapter,
    Message,
    MoveAdapter,
    Output,
    PushAdapter,
    UnloadAdapter,
)
from tp_engine.params import SamplingParams

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPT = [5, 6, 7]
PAUSE = 0.0002
"""Seconds."""


class FakeLoader(AdapterLoader):
    """Reads an adapter whose configuration is its name: ``good-3`` has 3 pages, ``bad`` a NaN."""

    layout = "fake"

    def __init__(self, store: AdapterStore | None) -> None:
        super().__init__(None, store)  # type: ignore[arg-type]  # nothing is cut for ranks
        self.gate = threading.Event()
        self.gate.set()
        self.full = False
        """Whether nothing more can be written to the store."""

    def read(self, directory: Path) -> AdapterRevision:
        assert self.gate.wait(10)
        name = (directory / "adapter_config.json").read_text()
        if name.startswith("bad"):
            raise AdapterError("not_finite", f"{name} has a NaN")
        module = LoraModule(a=torch.zeros(4, 1), b=torch.zeros(1, 4), scale=1.0)
        return AdapterRevision(digest=name, source=name, modules={(0, 0): module}, expected=1)

    def pack(self, revision: AdapterRevision) -> list[Any]:
        pages = int(revision.digest.split("-")[1])
        return [
            FakeImage(
                name=revision.digest,
                pages=torch.zeros((pages, LAYOUT.page_bytes), dtype=torch.uint8),
                record=torch.zeros(8, dtype=torch.int64),
                row_bytes=0,
            )
        ]

    def write_back(self, digest: str, record: Callable[[], list[str]]) -> list[str]:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write_back(digest, record)


def write_adapter(directory: Path, name: str) -> Path:
    """An adapter's files."""
    directory.mkdir(parents=True)
    (directory / "adapter_model.safetensors").write_bytes(name.encode() * 10)
    (directory / "adapter_config.json").write_text(name)
    return directory


class World:
    """An engine, its fleet, and a clock's patience."""

    def __init__(
        self,
        root: Path,
        *,
        store: AdapterStore | None,
        drain_timeout: float = 60.0,
        flush_interval: float = 0.0,
        host_pages: int = 1000,
    ) -> None:
        for name in ("good-2", "good-3", "good-19", "good-20", "good-99", "bad"):
            if not (root / name).exists():
                write_adapter(root / name, name)
        self.root = root
        self.store = store
        self.loader = FakeLoader(store)
        self.engine, self.worker = make_engine(host_pages=host_pages, fetch=self.loader.fetch)
        self.registry = AdapterRegistry(["base"])
        starting = StartingAdapters(self.loader, self.engine.tiers.host.num_pages)
        self.pinned = starting.restore(self.registry)
        starting.hand_out(self.engine, self.registry, "fail")
        self.fleet = AdapterFleet(
            self.engine,
            self.registry,
            self.loader,
            roots=[root],
            fetched=root / "fetched",
            drain_timeout=drain_timeout,
            flush_interval=flush_interval,
            pinned=self.pinned,
        )
        self.numbers = itertools.count()
        self.tokens: dict[str, list[int]] = {}
        self.replies: list[AdapterReply] = []
        """Those that came while stepping."""

    # --- calls -------------------------------------------------------------------------------

    def begin(self, call: type[AdapterCall], **fields: Any) -> list[AdapterReply]:
        """Begin a call; what is answered at once."""
        return self.fleet.handle(call(call_id=str(next(self.numbers)), **fields))

    def do(self, call: type[AdapterCall], **fields: Any) -> AdapterReply:
        """A whole call."""
        reply = self.until_answered(*self.begin(call, **fields))
        assert isinstance(reply, AdapterReply)
        return reply

    def load(self, name: str, path: str, *, in_place: bool = False) -> AdapterReply:
        """A whole load."""
        return self.do(LoadAdapter, name=name, path=str(self.root / path), in_place=in_place)

    def begin_load(self, name: str, path: str, *, in_place: bool = False) -> list[AdapterReply]:
        return self.begin(LoadAdapter, name=name, path=str(self.root / path), in_place=in_place)

    def spool(self, adapter: str) -> Path:
        """Pushed files, as the front end hands it over."""
        return write_adapter(self.root / "spool" / str(next(self.numbers)), adapter)

    def push(self, name: str, adapter: str) -> AdapterReply:
        """A whole push."""
        return self.do(PushAdapter, name=name, directory=str(self.spool(adapter)))

    def unload(self, name: str) -> AdapterReply:
        return self.do(UnloadAdapter, name=name)

    def unload_begun(self, name: str) -> None:
        """An unload whose answer nobody waits for."""
        assert self.begin(UnloadAdapter, name=name) == []
        self.fleet.turn()

    def move(self, name: str, revision: str | None) -> AdapterReply:
        return self.do(MoveAdapter, name=name, revision=revision)

    def flush(self, name: str | None = None) -> AdaptersFlushed:
        answer = self.until_answered(*self.begin(FlushAdapters, name=name))
        assert isinstance(answer, AdaptersFlushed)
        return answer

    def show(self, name: str) -> AdapterStatus:
        answer = self.until_answered(*self.begin(ListAdapters, name=name))
        assert isinstance(answer, AdapterList)
        (status,) = answer.adapters
        return status

    def turn(self) -> list[Message]:
        """A turn without a step, after a pause: a loop of nothing but turns would keep the
        interpreter from the thread that it waits for."""
        time.sleep(PAUSE)
        return self.fleet.turn()

    def until_replied(self) -> AdapterReply:
        """Turns without steps, until the one open call is answered."""
        reply = self.until_answered()
        assert isinstance(reply, AdapterReply)
        return reply

    def until_answered(self, *replies: Message) -> Message:
        """Turns without steps, until there is an answer; the first of those given, if any."""
        found = list(replies)
        deadline = time.monotonic() + 10
        while not found:
            assert time.monotonic() < deadline
            found = [m for m in self.turn() if not isinstance(m, Failed)]
        (reply,) = found
        return reply

    def until(self, condition: Callable[[], bool]) -> None:
        """Turns without steps, until something holds."""
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            self.turn()

    def settle(self) -> None:
        """Turns without steps, until nothing is under way."""
        deadline = time.monotonic() + 10
        while self.fleet.busy:
            assert time.monotonic() < deadline
            self.turn()
        self.reader_idle()

    def reader_idle(self) -> None:
        """Return when the other threads have done all that they were given."""
        self.fleet._reader.submit(lambda: None).result(10)
        self.fleet._recorder.submit(lambda: None).result(10)  # which gives the reader nothing

    # --- requests ----------------------------------------------------------------------------

    def ask(self, request_id: str, name: str) -> None:
        revision = self.registry.resolve(name).revision
        submit(self.engine, request_id, PROMPT, PARAMS, revision, model=name)

    def step(self) -> list[Failed]:
        """One step and one turn; the requests that were ended."""
        failed = []
        for message in [*self.engine.step(), *self.fleet.turn()]:
            if isinstance(message, Output):
                self.tokens.setdefault(message.request_id, []).extend(message.tokens)
            if isinstance(message, Failed):
                failed.append(message)
            if isinstance(message, AdapterReply):
                self.replies.append(message)
        return failed

    def run(self) -> dict[str, list[int]]:
        """All open requests to their ends: the tokens of all there ever were."""
        while self.engine.requests:
            self.step()
        return self.tokens


def known(engine: Engine) -> list[str]:
    return sorted(engine.adapters)


def open_store(root: Path) -> AdapterStore:
    return AdapterStore(root, base_digest="base", architecture="Llama", vocab_size=50)


@contextmanager
def world_at(root: Path, **options: Any) -> Generator[World]:
    """A world with a store of its own, there again after a restart."""
    store = open_store(root / "store")
    world = World(root, store=store, **options)
    try:
        yield world
    finally:
        world.fleet.close()
        world.fleet._reader.shutdown()
        world.fleet._recorder.shutdown()
        store.close()
    assert world.engine.check_integrity() == []
