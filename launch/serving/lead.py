"""Rank 0 of a service: front end, engine, serving loop, orderly end."""

from __future__ import annotations

import logging
import math
import os
import subprocess
import threading
import time
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from launch.options import Options, resolved
from launch.preflight import (
    RankEnvironment,
    check_model_directory,
    check_port,
    check_sources,
    claim_store,
    start_warnings,
)
from launch.serving.ending import (
    LOSS_SECONDS,
    StopRequest,
    end_if_lost,
    end_now,
    serving_signals,
)
from launch.serving.start import start_rank
from server.process import start_front_end
from server.settings import FrontEndSettings
from sharding import cut_table
from tp_engine.adapters import AdapterRegistry
from tp_engine.adapters.store import AdapterStore
from tp_engine.engine import Engine
from tp_engine.fleet import AdapterFleet, AdapterLoader, StartingAdapters
from tp_engine.hub import download_model
from tp_engine.interpreter import freeze_objects
from tp_engine.link import FrontEndGone, FrontEndLink
from tp_engine.logs import Phases
from tp_engine.messages import Failed, Models, Phase, Ready
from tp_engine.models import ModelSpec
from tp_engine.rank import Rank, build_engine, read_adapters
from tp_engine.ranks.liveness import Liveness, Watchdog
from tp_engine.service import Service, ServiceOptions
from tp_engine.sources import claims_directory
from tp_engine.steps.plan import PlanKind
from tp_engine.steps.warm_up import warm_up

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""For a lost peer to show, before a stop is taken for a user's."""
LEAVE_SECONDS = 10.0
"""For the front end and the other ranks to leave once all is done."""


class Lead:
    """Rank 0, from its options to its end."""

    def __init__(self, options: Options, environment: RankEnvironment, watchdog: Watchdog) -> None:
        self._options = options
        self._config = options.config
        self._environment = environment
        self._watchdog = watchdog
        self._stop = StopRequest()
        self._front_end: subprocess.Popen[bytes] | None = None
        self._leaving = False

    def run(self) -> None:
        """Start, serve until told to stop, drain, end.

        Raises:
            ValueError: the start failed; says what to do.
            RuntimeError: the service was lost.
        """
        store = self._config.adapter_store
        with nullcontext() if store is None else claim_store(Path(store)):
            self._run()

    def _run(self) -> None:
        try:
            self._start_front_end()
            self._serve()
            self._wait_for_front_end(LEAVE_SECONDS)
        finally:
            self._leaving = True
            if self._front_end is not None and self._front_end.poll() is None:
                self._front_end.kill()
                self._front_end.wait()
            if self._front_end is not None:
                self._link.close()

    def _start_front_end(self) -> None:
        """Check what it needs and start it: before CUDA is, and before anything slow."""
        config = self._config
        for warning in start_warnings(config, torchrun=self._environment.torchrun):
            log.warning("%s", warning)
        check_port(config.host, config.port)
        check_sources(config)
        directory = download_model(config.engine)
        check_model_directory(directory, weights=config.engine.load_format == "safetensors")
        ModelSpec.from_directory(directory)
        self._link = FrontEndLink()  # not before: from here on there are files to remove
        settings = FrontEndSettings(
            to_engine=self._link.to_engine,
            to_front_end=self._link.to_front_end,
            parent_pid=os.getpid(),
            model_directory=str(directory),
            host=config.host,
            port=config.port,
            chat_template_file=config.chat_template,
            api_key_file=config.api_key_file,
            admin_key_file=config.admin_key_file,
            allowed_origins=config.allowed_origins,
            max_body_bytes=config.max_body_bytes,
            adapter_store=config.adapter_store,
            adapter_sources=config.adapter_source,
            max_adapter_bytes=config.adapter_max_bytes,
            max_open_requests=config.max_open_requests,
            call_timeout_s=config.adapter_call_timeout,
            keep_alive_s=math.ceil(config.keep_alive),
            access_log=config.access_log,
        )
        self._front_end = start_front_end(settings)
        threading.Thread(target=self._watch, args=(self._front_end,), daemon=True).start()

    def _watch(self, front_end: subprocess.Popen[bytes]) -> None:
        code = front_end.wait()
        left = code == 0 and self._stop.asked  # its goodbye may still be unread
        if not (left or self._leaving):
            self._link.remove_files()
            end_now(f"the HTTP front end ended with exit code {code}")

    def _wait_for_front_end(self, seconds: float) -> None:
        """Let it hand its last answers to its clients and leave."""
        self._leaving = True
        assert self._front_end is not None
        deadline = time.monotonic() + seconds
        while self._front_end.poll() is None:
            if time.monotonic() > deadline:
                log.warning("the HTTP front end did not leave within %g s and is killed", seconds)
                return
            self._link.receive(0.1)  # also sends what it could not take before

    def _serve(self) -> None:
        config = self._config.engine
        phases = Phases(lambda name: self._link.send([Phase(name=name)]))
        rank = start_rank(config, phases)
        self._log_rank(rank)
        loader = AdapterLoader(rank, self._open_store(rank))
        engine = build_engine(rank, loader.fetch)
        with phases.phase("read adapters"):
            starting = StartingAdapters(loader, engine.tiers.host.num_pages)
            registry = read_adapters(rank.joined, starting.take)
            pinned = starting.restore(registry)
        rank.comm.gather_numbers([1])
        liveness = Liveness(rank.comm, config.rank_timeout, end_now)
        with phases.phase("hand out adapters"):
            starting.hand_out(engine, registry, config.lora_on_error)
        with phases.phase("warm up"):
            gpu = rank.comm.device.type == "cuda"
            warm_up(engine, gpu=gpu, max_rank=self._config.expected_lora_rank)
        freeze_objects()
        engine.control(PlanKind.RETURN)
        serving_signals(self._stop.handle)
        # Later than the others: who waits for a rank that hangs lets it tell so itself.
        self._watchdog.limit(config.rank_timeout + LOSS_SECONDS)
        fleet = AdapterFleet(
            engine,
            registry,
            loader,
            roots=[Path(root) for root in self._config.adapter_root],
            fetched=self._fetched(),
            drain_timeout=self._config.adapter_drain_timeout,
            flush_interval=self._config.flush_interval,
            pinned=pinned,
        )
        with closing(fleet):
            self._loop(engine, registry, fleet, liveness, phases.seconds)

    def _fetched(self) -> Path | None:
        store = self._config.adapter_store
        return None if store is None else claims_directory(Path(store))

    def _open_store(self, rank: Rank) -> AdapterStore | None:
        if self._config.adapter_store is None:
            return None
        return AdapterStore(
            Path(self._config.adapter_store),
            base_digest=rank.base_digest,
            architecture=rank.joined.spec.architecture,
            vocab_size=rank.dims.vocab,
        )

    def _loop(
        self,
        engine: Engine,
        registry: AdapterRegistry,
        fleet: AdapterFleet,
        liveness: Liveness,
        start_seconds: float,
    ) -> None:
        config = self._config.engine
        service = Service(
            engine,
            registry,
            self._link,
            fleet,
            ServiceOptions(
                heartbeat=config.rank_timeout / 4,
                drain_timeout=config.drain_timeout,
                throughput_line=self._config.stats_interval,
                base_root=config.model,
            ),
            # torchrun stops the rest of a broken service with the signal that a user would send.
            stopping=lambda: self._stop.asked and liveness.reason(LOOK_SECONDS) is None,
            progress=self._watchdog.progress,
        )
        self._announce(engine, service.models(), start_seconds)
        try:
            service.run()
        except Exception as error:
            end_if_lost(liveness)
            self._fail_open_requests()
            raise RuntimeError("the serving loop failed") from error
        liveness.close()
        engine.control(PlanKind.STOP)
        liveness.wait_for_peers(LEAVE_SECONDS)
        self._watchdog.limit(math.inf)
        log.info("drained; the service has ended")

    def _fail_open_requests(self) -> None:
        reason = "the engine failed; the server's log has the details"
        with suppress(FrontEndGone):
            self._link.send([Failed(request_id="", code="engine_dead", message=reason)])
            self._wait_for_front_end(LEAVE_SECONDS)

    def _log_rank(self, rank: Rank) -> None:
        chosen = replace(self._config, engine=rank.config)
        log.info("%s", resolved(chosen, self._options.origins))
        layout = rank.layout
        log.info("how the model is cut:\n%s", cut_table(rank.cuts))
        log.info(
            "arena: %d pages of %d bytes a rank, each %d tokens; the tail of a KV page that "
            "stays unused, by rank: %s bytes",
            rank.num_pages,
            layout.page_bytes,
            layout.block_tokens,
            rank.unused_page_bytes(),
        )

    def _announce(self, engine: Engine, served: Models, seconds: float) -> None:
        config, limits = self._config, engine.limits
        self._link.send(
            [
                Ready(
                    models=served.models,
                    max_model_len=served.max_model_len,
                    vocab_size=limits.vocab_size,
                )
            ]
        )
        host = f"[{config.host}]" if ":" in config.host else config.host
        log.info(
            "ready after %.1f s: http://%s:%d/v1 serves %s and %d adapters; %d KV tokens, longest "
            "context %d",
            seconds,
            host,
            config.port,
            ", ".join(config.engine.base_names),
            sum(card.parent is not None for card in served.models),
            limits.num_pages * engine.layout.block_tokens,
            served.max_model_len,
        )
