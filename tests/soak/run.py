"""A whole soak: a service, its clients and operators, and what must hold at the end.

register ─> traffic ─> what the server lists ─> kill -9, restart ─> the same list, and right answers
─> delete ─> nothing is left
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.service import HOST, Server
from tests.soak.http import Target, ask
from tests.soak.judge import Verdict, check_outputs, check_revisions
from tests.soak.ledger import Ledger
from tests.soak.metrics import KNOWN, RESIDENT, RUNNING, WAITING, read_metrics
from tests.soak.operators import ADMIN, Operators
from tests.soak.options import SoakOptions
from tests.soak.service import ADMIN_KEY, KEY, Files, arena_pages, start
from tests.soak.steps import Kind, kinds_of, own_seconds, read_records, starved
from tests.soak.traffic import Traffic

QUIET_SECONDS = 30.0
RESTARTED_SECONDS = 5.0
"""Of traffic after the restart."""
SAMPLED = (
    "tp_engine:pages_kv",
    "tp_engine:pages_cached",
    "tp_engine:pages_adapters",
    RESIDENT,
    "tp_engine:adapters_warm",
)


@dataclass(kw_only=True)
class Report:
    """What a soak saw."""

    seconds: float
    """Of traffic."""
    pages: int
    counts: dict[str, int]
    verdict: Verdict
    faults: list[str]
    """Everything that should not have happened."""
    gauges: dict[str, list[float]] = field(default_factory=dict)
    """Samples while it ran."""
    counters: dict[str, float] = field(default_factory=dict)
    growth: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Open files and threads of all processes: before the traffic, after it."""
    steps: list[Kind] = field(default_factory=list)
    starved: float = 0.0
    """Share of the steps' time in which the ranks had no core."""


def run_soak(options: SoakOptions, directory: Path) -> Report:
    """Run one, with all files in ``directory``."""
    files = Files.make(directory, options)
    pages = arena_pages(files.model, options)
    with start(files, options, pages=pages) as server:
        server.wait_ready()
        soak = Soak(options, server, files)
        asyncio.run(soak.run())
        first, wall, own = own_seconds(read_records(directory, options.ranks))
        soak.check_log(server)
        for process in server.processes().values():
            process.send_signal(signal.SIGKILL)
    with start(files, options, pages=pages, port=server.port) as server:
        server.wait_ready()
        asyncio.run(soak.end())
        soak.check_log(server)
        server.process.send_signal(signal.SIGTERM)
        server.wait_ended(60)
    report = soak.report(pages)
    report.steps, report.starved = kinds_of(first, wall, own, soak.loads), starved(wall, own)
    return report


class Soak:
    """The traffic on one service."""

    def __init__(self, options: SoakOptions, server: Server, files: Files) -> None:
        self._options = options
        self._files = files
        self._processes = server.processes()
        self.ledger = Ledger([f"tenant-{number}" for number in range(options.adapters)])
        clients = Target(host=HOST, port=server.port, key=KEY)
        self._traffic = Traffic(clients, self.ledger, options.seed)
        self._operator = Target(host=HOST, port=server.port, key=ADMIN_KEY)
        self._operators = Operators(
            self._operator,
            self.ledger,
            files.variants,
            files.broken,
            self._traffic.draw,
            options.pause,
        )
        self._gauges: dict[str, list[float]] = {}
        self._counters: dict[str, float] = {}
        self._growth: list[dict[str, float]] = []

    @property
    def loads(self) -> list[tuple[float, float]]:
        """When calls that may move bytes were open, by ``time.monotonic``."""
        return self._operators.intervals

    async def run(self) -> None:
        """Register, run the traffic, and compare what the server lists with the ledger."""
        await self._operators.load_all(workers=4)
        self._growth.append(self._resources())
        going = _for(self._options.seconds)
        await asyncio.gather(
            self._clients(going),
            *(self._operators.operator(n, going) for n in range(self._options.operators)),
            self._watch(going),
        )
        await self._quiet()
        self._growth.append(self._resources())
        await self._check_list()
        flushed = await ask(self._operator, "POST", "/admin/flush")
        if flushed.status != 200:
            self.ledger.fault(f"flush: {flushed.body}")

    async def end(self) -> None:
        """After a restart: is all there, is it right, and is nothing left when it is deleted?"""
        await self._check_list()
        await self._clients(_for(RESTARTED_SECONDS))
        await self._quiet()
        await self._operators.delete_all()
        await self._until("the base level", lambda metrics: not self._left(metrics))
        if left := self._left(await read_metrics(self._operator)):
            self.ledger.fault(f"left at the end: {left}")

    async def _clients(self, going: Callable[[], bool]) -> None:
        await asyncio.gather(
            *(self._traffic.client(number, going) for number in range(self._options.clients))
        )

    async def _quiet(self) -> None:
        await self._until("no open requests", lambda m: not (m[RUNNING] or m[WAITING]))

    async def _watch(self, going: Callable[[], bool]) -> None:
        """Sample the gauges."""
        while going():
            await asyncio.sleep(1.0)
            metrics = await read_metrics(self._operator) | self._memory()
            for name in (*SAMPLED, *self._memory()):
                self._gauges.setdefault(name, []).append(metrics[name])
            if metrics["tp_engine:integrity_faults"]:
                self.ledger.fault(f"{metrics['tp_engine:integrity_faults']} faults in the books")
            self._counters = metrics

    async def _until(self, what: str, holds: Callable[[dict[str, float]], bool]) -> None:
        going = _for(QUIET_SECONDS)
        while not holds(await read_metrics(self._operator)):
            if not going():
                self.ledger.fault(f"not within {QUIET_SECONDS:g} s: {what}")
                break
            await asyncio.sleep(0.2)

    async def _check_list(self) -> None:
        """The server's word on every adapter, when nothing is open."""
        by_name = {name.name: name for name in self.ledger.names if name.past}
        listed, after = {}, ""
        while page := (await ask(self._operator, "GET", f"{ADMIN}?limit=97&after={after}")).body[
            "adapters"
        ]:
            after = page[-1]["name"]
            listed |= {each["name"]: each for each in page}
        if set(listed) != set(by_name):
            self.ledger.fault(f"listed, or not: {set(listed) ^ set(by_name)}")
        for name in set(listed) & set(by_name):
            self._operators.check_shown(by_name[name], listed[name])
            if listed[name]["requests"]:
                self.ledger.fault(f"{name} has open requests: {listed[name]}")

    def check_log(self, server: Server) -> None:
        """A service that serves logs no error."""
        if "Traceback" in server.log or "ERROR" in server.log:
            self.ledger.fault(f"the service's log tells of errors:\n{server.log}")

    def _left(self, metrics: dict[str, float]) -> dict[str, float]:
        """What is left of adapters and requests that are gone; nothing should be."""
        gauge = {name.removeprefix("tp_engine:"): value for name, value in metrics.items()}
        left = {
            "pages": gauge["pages_total"] - gauge["pages_free"] - gauge["pages_cached"],
            "host pages": gauge["host_pages_total"] - gauge["host_pages_free"],
            "revisions": metrics[KNOWN],
            "files": float(sum(len(files) for _, _, files in list(os.walk(self._files.store))[1:])),
        }
        return {name: count for name, count in left.items() if count}

    def _memory(self) -> dict[str, float]:
        """MiB by process."""
        return {
            f"memory of {role}": process.memory_info().rss / 2**20
            for role, process in self._processes.items()
        }

    def _resources(self) -> dict[str, float]:
        """Of all processes of the service."""
        found = {"files": 0.0, "threads": 0.0}
        for process in self._processes.values():
            found["files"] += process.num_fds()
            found["threads"] += process.num_threads()
        return found

    def report(self, pages: int) -> Report:
        """What all of it shows; compares every output."""
        seen = self._traffic.seen
        verdict = check_outputs(self._files.model, self._operators.directories, seen)
        before, after = self._growth
        return Report(
            seconds=self._options.seconds,
            pages=pages,
            counts=dict(sorted(self.ledger.counts.items())),
            verdict=verdict,
            faults=self.ledger.faults + check_revisions(seen, self.ledger) + verdict.wrong,
            gauges=self._gauges,
            counters=self._counters,
            growth={name: (before[name], after[name]) for name in before},
        )


def _for(seconds: float) -> Callable[[], bool]:
    """Whether so much time has not passed yet."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() < until
