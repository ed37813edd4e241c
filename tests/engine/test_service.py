"""Rank 0's loop, between a front end that is a list and an engine without a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.engine.fleet_world import world_at
from tp_engine.messages import Draining, Failed, Goodbye, Message, Submit, ToEngine
from tp_engine.params import SamplingParams
from tp_engine.service import Service, ServiceOptions

OPTIONS = ServiceOptions(heartbeat=60.0, drain_timeout=10.0, throughput_line=0.0, base_root="base")
PATIENCE = 5.0
"""Seconds."""


class FrontEnd:
    """Says something, then something happens, and leaves when the engine drains."""

    def __init__(self, said: list[ToEngine], happens: Callable[[], None]) -> None:
        self.heard: list[Message] = []
        self._turns = iter([lambda: said, happens])

    def receive(self, timeout: float) -> list[ToEngine]:
        time.sleep(min(timeout, 0.001))
        if any(isinstance(message, Draining) for message in self.heard):
            return [Goodbye()]
        return next(self._turns, lambda: None)() or []

    def send(self, messages: Sequence[Message]) -> None:
        self.heard += messages

    def failures(self) -> list[tuple[str, str]]:
        return [(each.request_id, each.code) for each in self.heard if isinstance(each, Failed)]


def test_a_request_that_is_alone_hears_that_its_adapter_cannot_be_read(tmp_path: Path) -> None:
    """Whichever turn of the loop comes to know it."""
    with world_at(tmp_path, host_pages=3) as world:
        world.load("x", "good-2")
        world.load("y", "good-3")
        assert not world.engine.roster.is_warm("good-2"), "its copy has made room"
        assert world.store is not None
        (world.store.directory("good-2") / "adapter_config.json").write_text("bad")
        world.loader.gate.clear()

        def read() -> None:
            world.loader.gate.set()
            while world.engine.tiers.fetcher.peek() is None:
                time.sleep(0.001)

        params = SamplingParams(max_tokens=4)
        submit = Submit(request_id="r", model="x", prompt=[1, 2], params=params)
        end, until = FrontEnd([submit], read), time.monotonic() + PATIENCE
        service = Service(
            world.engine,
            world.registry,
            end,  # type: ignore[arg-type]  # stands in for the sockets
            world.fleet,
            OPTIONS,
            stopping=lambda: bool(end.failures()) or time.monotonic() > until,
            progress=lambda: None,
        )
        service.run()
        assert end.failures() == [("r", "adapter_unavailable")]
        assert world.engine.counters["failed"] == 1 and not world.engine.requests
