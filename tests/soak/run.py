"""A whole soak: a service, its clients and operators, and what must hold at the end."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from launch.planning import AdapterKind, plan_capacity
from tests.e2e.service import HOST, Server
from tests.soak.http import Target, ask, opened
from tests.soak.judge import Verdict, check_outputs, check_revisions
from tests.soak.ledger import Ledger
from tests.soak.material import (
    CONTEXT,
    RANKS,
    Variant,
    make_broken,
    make_model,
    make_variants,
)
from tests.soak.operators import ADMIN, Operators
from tests.soak.options import SoakOptions
from tests.soak.steps import Kind, kinds_of, own_seconds, read_records
from tests.soak.traffic import BASE, Traffic
from tp_engine.config import EngineConfig
from tp_engine.models import ModelSpec

KEY, ADMIN_KEY = "sk-client", "sk-admin"
QUIET_SECONDS = 30.0
SAMPLED = (
    "tp_engine:pages_kv",
    "tp_engine:pages_cached",
    "tp_engine:pages_adapters",
    "tp_engine:adapters_resident",
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


def run_soak(options: SoakOptions, directory: Path) -> Report:
    """Run one, with all files in ``directory``."""
    model = make_model(directory / "model")
    root = directory / "adapters"
    variants = make_variants(root, options.adapters + options.spare, options.seed)
    make_broken(root / "broken")
    pages = arena_pages(model, options)
    (directory / "keys").write_text(KEY)
    (directory / "admin").write_text(ADMIN_KEY)
    with Server(
        directory,
        model,
        f"--served-model-name={BASE}",
        f"--num-pages={pages}",
        f"--max-num-seqs={options.clients}",
        f"--api-key-file={directory / 'keys'}",
        f"--admin-key-file={directory / 'admin'}",
        f"--adapter-root={root}",
        f"--adapter-store={directory / 'store'}",
        f"--adapter-host-memory={options.host_memory}",
        "--flush-interval=5",
        ranks=options.ranks,
        key=KEY,
        script="tests/soak/serve.py",
        environment={
            "SOAK_STEPS": str(directory),
            "OMP_NUM_THREADS": "1",
            "GOMP_SPINCOUNT": "0",
        },
    ) as server:
        server.wait_ready()
        soak = Soak(options, server, variants, root, directory / "store")
        asyncio.run(soak.run())
        if "Traceback" in server.log or "ERROR" in server.log:
            soak.ledger.fault(f"the service's log tells of errors:\n{server.log}")
        server.process.send_signal(signal.SIGTERM)
        server.wait_ended(60)
    return soak.report(model, pages, directory)


def arena_pages(model: Path, options: SoakOptions) -> int:
    """Pages for so many average adapters, and all requests' keys and values beside them."""
    spec = ModelSpec.from_directory(model)
    config = EngineConfig(model=str(model), dtype="float32", num_pages=1)
    capacity = plan_capacity(
        spec,
        config.resolve(cuda=False, model_positions=CONTEXT),
        options.ranks,
        memory=0,
        kinds=[AdapterKind(rank=rank, count=1) for rank in RANKS],
        kv_tokens=0,
    )
    average = sum(need.pages for need in capacity.kinds) / len(RANKS)
    return round(options.resident * average) + options.clients * capacity.layout.blocks(
        CONTEXT // 2
    )


class Soak:
    """The traffic on one service."""

    def __init__(
        self, options: SoakOptions, server: Server, variants: list[Variant], root: Path, store: Path
    ) -> None:
        self._options = options
        self._server = server
        self._store = store
        self._processes = server.processes()
        self.ledger = Ledger([f"tenant-{number}" for number in range(options.adapters)])
        self._traffic = Traffic(
            Target(host=HOST, port=server.port, key=KEY), self.ledger, options.seed
        )
        self._operator = Target(host=HOST, port=server.port, key=ADMIN_KEY)
        self._operators = Operators(
            self._operator,
            self.ledger,
            variants,
            root / "broken",
            self._traffic.draw,
            options.pause,
        )
        self._gauges: dict[str, list[float]] = {}
        self._counters: dict[str, float] = {}
        self._growth: list[dict[str, float]] = []

    async def run(self) -> None:
        """Register, run the traffic, and look whether all is given back."""
        options = self._options
        await self._operators.load_all(workers=4)
        self._growth.append(self._resources())
        until = time.monotonic() + options.seconds

        def going() -> bool:
            return time.monotonic() < until

        await asyncio.gather(
            *(self._traffic.client(number, going) for number in range(options.clients)),
            *(self._operators.operator(number, going) for number in range(options.operators)),
            self._watch(going),
        )
        await self._until("no open requests", lambda m: not (m[_RUNNING] or m[_WAITING]))
        self._growth.append(self._resources())
        await self._check_list()
        await self._operators.delete_all()
        await self._until("the base level", lambda metrics: not self._left(metrics))
        if left := self._left(self._counters):
            self.ledger.fault(f"left at the end: {left}")

    async def _watch(self, going: Callable[[], bool]) -> None:
        """Sample the gauges."""
        while going():
            await asyncio.sleep(1.0)
            metrics = await self._metrics()
            metrics |= self._memory()
            for name in (*SAMPLED, *self._memory()):
                self._gauges.setdefault(name, []).append(metrics[name])
            if metrics["tp_engine:integrity_faults"]:
                self.ledger.fault(f"{metrics['tp_engine:integrity_faults']} faults in the books")

    async def _metrics(self) -> dict[str, float]:
        async with asyncio.timeout(30):
            return await _metrics(self._operator)

    async def _until(self, what: str, holds: Callable[[dict[str, float]], bool]) -> None:
        deadline = time.monotonic() + QUIET_SECONDS
        while not holds(metrics := await self._metrics()):
            if time.monotonic() > deadline:
                self.ledger.fault(f"not within {QUIET_SECONDS:g} s: {what}")
                break
            await asyncio.sleep(0.2)
        self._counters = metrics

    async def _check_list(self) -> None:
        """The server's word on every adapter, when nothing is open."""
        by_name = {name.name: name for name in self.ledger.names if name.past}
        listed = {}
        after = ""
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

    def _left(self, metrics: dict[str, float]) -> dict[str, float]:
        """What is left of adapters and requests that are gone; nothing should be."""
        gauge = {name.removeprefix("tp_engine:"): value for name, value in metrics.items()}
        left = {
            "pages": gauge["pages_total"] - gauge["pages_free"] - gauge["pages_cached"],
            "host pages": gauge["host_pages_total"] - gauge["host_pages_free"],
            "revisions": gauge["adapters"],
            "files": float(sum(path.is_file() for path in self._store.glob("*/**/*"))),
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

    def report(self, model: Path, pages: int, directory: Path) -> Report:
        """What all of it shows; compares every output."""
        seen = self._traffic.seen
        verdict = check_outputs(model, self._operators.directories, seen)
        before, after = (*self._growth, *self._growth)[:2]
        records = read_records(directory, self._options.ranks)
        return Report(
            seconds=self._options.seconds,
            pages=pages,
            counts=dict(sorted(self.ledger.counts.items())),
            verdict=verdict,
            faults=self.ledger.faults + check_revisions(seen, self.ledger) + verdict.wrong,
            gauges=self._gauges,
            counters=self._counters,
            growth={name: (before[name], after[name]) for name in before},
            steps=kinds_of(*own_seconds(records), self._operators.intervals),
        )


_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_SAMPLE = re.compile(r"^([a-z_]+:[a-z_0-9]+) (\S+)$", re.MULTILINE)
_RESIDENT = re.compile(r'running_lora_adapters="([^"]*)"')
_KNOWN = re.compile(r'max_lora="(\d+)"')


async def _metrics(target: Target) -> dict[str, float]:
    """All plain metrics, and how many revisions the engine knows and has in the arena."""
    async with opened(target, "GET", "/metrics") as response:
        await response.begin()
        text = (await response.body()).decode()
    found = {name: float(value) for name, value in _SAMPLE.findall(text)}
    known = _KNOWN.search(text)
    resident = _RESIDENT.search(text)
    found["tp_engine:adapters"] = float(known[1]) if known else 0.0
    found["tp_engine:adapters_resident"] = (
        float(len(resident[1].split(","))) if resident and resident[1] else 0.0
    )
    return found
