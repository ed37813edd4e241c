"""Rank 0's loop when it serves: front-end messages in, steps, front-end messages out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from tp_engine.adapters import AdapterRegistry, ModelHeld, UnknownModel
from tp_engine.engine import Engine
from tp_engine.fleet import AdapterFleet
from tp_engine.link import FrontEndLink
from tp_engine.messages import (
    Abort,
    AdapterReply,
    Admitted,
    Draining,
    Failed,
    Goodbye,
    ModelCard,
    Models,
    Submit,
    ToEngine,
)
from tp_engine.requests.admission import RequestError
from tp_engine.steps.plan import PlanKind

log = logging.getLogger(__name__)

IDLE_POLL_SECONDS = 0.2
BUSY_POLL_SECONDS = 0.005
"""While an adapter comes or goes."""
STATS_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceOptions:
    """Times in seconds, and what to say of the base."""

    heartbeat: float
    """Between plans when there is nothing to do."""
    drain_timeout: float
    """For open requests once the service is told to stop."""
    throughput_line: float
    """Between log lines on throughput; 0: none."""
    base_root: str
    """Where the base's weights came from, for ``/v1/models``."""


class Service:
    """Serves until told to stop and drained. Exceptions mean that the service is lost."""

    def __init__(
        self,
        engine: Engine,
        registry: AdapterRegistry,
        link: FrontEndLink,
        fleet: AdapterFleet,
        options: ServiceOptions,
        *,
        stopping: Callable[[], bool],
        progress: Callable[[], None],
    ) -> None:
        """Put the loop together.

        Args:
            stopping: whether a stop was asked for; may raise to end the service at once.
            progress: called every turn; whoever watches this rank measures from there.
        """
        self._engine = engine
        self._registry = registry
        self._link = link
        self._fleet = fleet
        self._options = options
        self._stopping = stopping
        self._progress = progress
        self._front_end_left = False
        self._counted = (0.0, 0.0)

    def run(self) -> None:
        """Serve and drain; the other ranks still follow."""
        last_plan = last_stats = last_line = time.monotonic()
        drain_until: float | None = None
        worked = False
        while True:
            self._progress()
            for message in self._link.receive(self._patience()):
                self._handle(message, draining=drain_until is not None)
            answers = self._fleet.turn()
            if self._fleet.changed:
                self._fleet.changed = False
                self._link.send([self.models()])  # before a caller is told that it is so
            self._link.send(answers)
            if drain_until is None and self._stopping():
                drain_until = time.monotonic() + self._options.drain_timeout
                log.info("draining %d open requests", len(self._engine.requests))
                self._link.send([Draining()])
            if drain_until is not None and self._drained(drain_until):
                break
            now = time.monotonic()
            if self._engine.requests:
                self._link.send(self._engine.step())
                last_plan, worked = now, True
            elif now - last_plan > self._options.heartbeat:
                self._engine.control(PlanKind.HEARTBEAT)
                last_plan = now
            went_idle = worked and not self._engine.requests
            if went_idle or now - last_stats > STATS_SECONDS:
                self._link.send([self._fleet.stats()])
                last_stats, worked = now, worked and not went_idle
            if 0 < self._options.throughput_line < now - last_line:
                self._log_throughput(now - last_line)
                last_line = now

    def models(self) -> Models:
        """What is served now."""
        parent, root = self._registry.base_names[0], self._options.base_root
        held = self._registry.held
        cards = [ModelCard(name=name, root=root) for name in self._registry.base_names]
        cards += [
            ModelCard(
                name=name,
                root=revision.source,
                parent=parent,
                revision=revision.digest,
                held=name in held,
            )
            for name, revision in self._registry.adapters.items()
        ]
        return Models(models=cards, max_model_len=self._engine.context)

    def _patience(self) -> float:
        """Seconds that a turn may wait for messages."""
        if self._engine.requests:
            return 0.0
        return BUSY_POLL_SECONDS if self._fleet.busy else IDLE_POLL_SECONDS

    def _drained(self, until: float) -> bool:
        """Whether all is done; past the time, what is left is ended with an error."""
        if self._engine.requests and time.monotonic() > until:
            for request_id in list(self._engine.requests):
                self._engine.abort(request_id)
                self._link.send([_failed(request_id, "shutting_down", "the service is stopping")])
        written = self._fleet.put_away()
        if time.monotonic() > until:
            if unsaved := self._fleet.unsaved:
                log.error("not written to the store and lost: %s", ", ".join(unsaved))
            return True
        return written and not self._engine.requests and self._front_end_left

    def _handle(self, message: ToEngine, *, draining: bool) -> None:
        if isinstance(message, Submit):
            if draining:
                text = "the service is stopping and takes no new requests"
                self._link.send([_failed(message.request_id, "shutting_down", text)])
            else:
                self._submit(message)
        elif isinstance(message, Abort):
            self._engine.abort(message.request_id, finished=message.finished)
        elif isinstance(message, Goodbye):
            self._front_end_left = True
        elif draining:
            text = "the service is stopping and loads no adapters"
            reply = AdapterReply(call_id=message.call_id, code="shutting_down", message=text)
            self._link.send([reply])
        else:
            self._link.send(self._fleet.handle(message))

    def _submit(self, message: Submit) -> None:
        try:
            digest = self._fleet.admit(message.model)
            self._engine.submit(message, digest)
            revision = digest or self._engine.limits.base_digest
            self._link.send([Admitted(request_id=message.request_id, revision=revision)])
        except (UnknownModel, ModelHeld) as error:
            self._link.send([_failed(message.request_id, error.code, str(error), "model")])
        except RequestError as error:
            self._link.send([_failed(message.request_id, error.code, str(error), error.param)])

    def _log_throughput(self, seconds: float) -> None:
        counters = self._engine.counters
        tokens = counters["prompt_tokens"], counters["generation_tokens"]
        prompt, generated = (now - then for now, then in zip(tokens, self._counted, strict=True))
        self._counted = tokens
        if prompt or generated:
            log.info(
                "prompt %.1f tokens/s, generation %.1f tokens/s, %d running, %d waiting",
                prompt / seconds,
                generated / seconds,
                len(self._engine.scheduler.running),
                len(list(self._engine.scheduler.queued)),
            )


def _failed(request_id: str, code: str, message: str, param: str | None = None) -> Failed:
    return Failed(request_id=request_id, code=code, message=message, param=param)
