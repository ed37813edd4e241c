"""The operators of a soak: they load, replace, promote, roll back, delete and look on at random."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.soak.http import Answer, Target, ask
from tests.soak.ledger import Ledger, Move, Name
from tests.soak.material import Variant

LOAD, UNLOAD, ADMIN = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/admin/adapters"


class Operators:
    """What may be done to the fleet, and the digest of every adapter that was ever loaded."""

    def __init__(
        self,
        target: Target,
        ledger: Ledger,
        variants: list[Variant],
        broken: Path,
        draw: Callable[[random.Random], Name],
        pause: float,
    ) -> None:
        """``draw`` picks the names that requests want; ``pause`` is the mean wait in seconds."""
        self._target = target
        self._ledger = ledger
        self._variants = variants
        self._broken = broken
        self._draw = draw
        self._pause = pause
        self.directories: dict[str, Path] = {}
        """By digest, as the server named them."""
        self._digests: dict[Path, str] = {}
        self.intervals: list[tuple[float, float]] = []
        """When calls that move bytes were open, by ``time.monotonic``."""

    async def load_all(self, workers: int) -> None:
        """Give every name its first adapter."""
        left = list(zip(self._ledger.names, self._variants, strict=False))

        async def work() -> None:
            while left:
                name, variant = left.pop()
                async with name.lock:
                    await self._load(name, variant.path)

        await asyncio.gather(*(work() for _ in range(workers)))

    async def delete_all(self) -> None:
        """Take every name away."""
        for name in self._ledger.names:
            async with name.lock:
                if name.past:
                    await self._delete(name)

    async def operator(self, number: int, going: Callable[[], bool]) -> None:
        """One operator: one call after the other."""
        rng = random.Random(f"operator {number}")
        while going():
            await asyncio.sleep(rng.expovariate(1 / self._pause) if self._pause else 0)
            name = self._draw(rng) if rng.random() < 0.5 else rng.choice(self._ledger.names)
            if not name.lock.locked():
                async with name.lock:
                    await self._change(name, rng)

    async def _change(self, name: Name, rng: random.Random) -> None:
        if not name.past:
            if rng.random() < 0.2:
                await self._load_twice(name, rng)
            else:
                await self._load(name, rng.choice(self._variants).path)
            return
        (what,) = rng.choices(
            (
                self._replace,
                self._push,
                self._promote,
                self._roll_back,
                self._delete_one,
                self._refuse,
                self._pin_or_flush,
                self._drain,
                self._look,
            ),
            (22, 16, 14, 17, 12, 6, 5, 4, 4),
        )
        await what(name, rng)

    # --- each of the calls ---------------------------------------------------------------------

    async def _replace(self, name: Name, rng: random.Random) -> None:
        await self._load(name, rng.choice(self._variants).path)

    async def _load(self, name: Name, path: Path) -> None:
        body = {"lora_name": name.name, "lora_path": str(path), "load_inplace": bool(name.past)}
        move = name.begin()
        answer = await self._call(move, "POST", LOAD, body)
        if self._expect(answer, 200, f"load {name.name} from {path.name}"):
            self._loaded(name, move, path, answer.body)

    def _loaded(self, name: Name, move: Move, path: Path, body: dict[str, Any]) -> None:
        digest = body["revision"]
        self._check_digest(path, digest)
        if body["modules_applied"] != body["modules_expected"]:
            self._ledger.fault(f"{path.name}: {body}")
        self._ledger.counts["replaced" if name.past else "loaded"] += 1
        name.moved(move, digest)

    async def _push(self, name: Name, rng: random.Random) -> None:
        """As a training loop does it."""
        path = rng.choice(self._variants).path
        files = {file.name: file.read_bytes() for file in path.iterdir()}
        move = name.begin()
        answer = await self._call(move, "POST", f"{ADMIN}/{name.name}/tensors", files=files)
        if self._expect(answer, 200, f"push {path.name} as {name.name}"):
            self._check_digest(path, answer.body["revision"])
            name.moved(move, answer.body["revision"], pushed=True)
            self._ledger.counts["pushed"] += 1

    def _check_digest(self, path: Path, digest: str) -> None:
        if self._digests.setdefault(path, digest) != digest:
            self._ledger.fault(f"{path.name} was {self._digests[path]}, is {digest}")
        if self.directories.setdefault(digest, path) != path:
            self._ledger.fault(f"{path.name} and {self.directories[digest].name} are one revision")

    async def _load_twice(self, name: Name, rng: random.Random) -> None:
        """Two loads of a new name at once: one of them must win, and say so."""
        paths = [variant.path for variant in rng.sample(self._variants, 2)]
        move = name.begin()
        answers = await asyncio.gather(
            *(
                self._call(move, "POST", LOAD, {"lora_name": name.name, "lora_path": str(path)})
                for path in paths
            )
        )
        statuses = [answer.status for answer in answers]
        if statuses.count(200) != 1 or not set(statuses) <= {200, 400, 409}:
            self._ledger.fault(f"two loads of {name.name}: {[answer.body for answer in answers]}")
            return
        winner = statuses.index(200)
        self._loaded(name, move, paths[winner], answers[winner].body)
        self._ledger.counts["of two loads one refused"] += 1

    async def _promote(self, name: Name, rng: random.Random) -> None:
        digest = rng.choice(name.past + name.undone)
        move, path = name.begin(), f"{ADMIN}/{name.name}/promote"
        answer = await self._call(move, "POST", path, {"revision": digest})
        if self._expect(answer, 200, f"promote {name.name} to {digest}"):
            if answer.body["revision"] != digest:
                self._ledger.fault(f"promoted {name.name} to {digest}: {answer.body}")
            name.moved(move, digest)
            self._ledger.counts["promoted"] += 1

    async def _roll_back(self, name: Name, rng: random.Random) -> None:
        move = name.begin()
        answer = await self._call(move, "POST", f"{ADMIN}/{name.name}/roll_back", None)
        if len(name.past) == 1:
            if (
                self._expect(answer, 400, f"roll {name.name} back")
                and answer.code != "nothing_before"
            ):
                self._ledger.fault(f"roll {name.name} back: {answer.body}")
        elif self._expect(answer, 200, f"roll {name.name} back"):
            name.rolled_back(move)
            if answer.body["revision"] != move.digest:
                self._ledger.fault(f"{name.name} went back to {answer.body}, not {move.digest}")
            self._ledger.counts["rolled back"] += 1

    async def _delete_one(self, name: Name, rng: random.Random) -> None:
        await self._delete(name, old_route=rng.random() < 0.5)

    async def _delete(self, name: Name, *, old_route: bool = False) -> None:
        move = name.begin()
        if old_route:
            answer = await self._call(move, "POST", UNLOAD, {"lora_name": name.name})
        else:
            answer = await self._call(move, "DELETE", f"{ADMIN}/{name.name}", None)
        if self._expect(answer, 200, f"delete {name.name}"):
            name.gone(move)
            self._ledger.counts["deleted"] += 1

    async def _refuse(self, name: Name, rng: random.Random) -> None:
        """A load that must be refused and change nothing."""
        body = {"lora_name": name.name, "lora_path": str(self._broken), "load_inplace": True}
        answer = await self._call(name.begin(), "POST", LOAD, body)
        if self._expect(answer, 400, "load what is broken") and answer.code != "not_finite":
            self._ledger.fault(f"load what is broken: {answer.body}")
        self._ledger.counts["refused"] += 1

    async def _pin_or_flush(self, name: Name, rng: random.Random) -> None:
        """What changes no meaning."""
        what = rng.choice(["pin", "unpin", "flush"])
        answer = await self._call(name.begin(), "POST", f"{ADMIN}/{name.name}/{what}")
        self._expect(answer, 200, f"{what} {name.name}")
        self._ledger.counts["pinned, unpinned or flushed"] += 1

    async def _drain(self, name: Name, rng: random.Random) -> None:
        """For a moment, no requests."""
        began = time.monotonic()
        for what in ("drain", "resume"):
            answer = await self._call(name.begin(), "POST", f"{ADMIN}/{name.name}/{what}")
            self._expect(answer, 200, f"{what} {name.name}")
            await asyncio.sleep(rng.random() / 2)
        name.drained.append((began, time.monotonic()))
        self._ledger.counts["drained and resumed"] += 1

    async def _look(self, name: Name, rng: random.Random) -> None:
        answer = await ask(self._target, "GET", f"{ADMIN}/{name.name}")
        if self._expect(answer, 200, f"show {name.name}"):
            self.check_shown(name, answer.body)
        self._ledger.counts["looked at"] += 1

    def check_shown(self, name: Name, shown: dict[str, Any]) -> None:
        """What the server says of a name that nobody is changing."""
        past = [shown["revision"], *([] if shown["dirty"] else shown["history"][1:])]
        if past != name.past[::-1][: len(past)] or (
            len(past) < len(name.past) and not shown["dirty"]
        ):
            self._ledger.fault(f"{name.name} is shown as {shown}, was {name.past[::-1]}")

    # -------------------------------------------------------------------------------------------

    async def _call(
        self,
        move: Move,
        method: str,
        path: str,
        body: Any = None,
        files: dict[str, bytes] | None = None,
    ) -> Answer:
        began = time.monotonic()
        try:
            return await ask(self._target, method, path, body, files)
        finally:
            move.ended = time.monotonic()
            self.intervals.append((began, move.ended))

    def _expect(self, answer: Answer, status: int, what: str) -> bool:
        if answer.status != status:
            self._ledger.fault(f"{what}: {answer.status} {answer.body}")
        return answer.status == status
