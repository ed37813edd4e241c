"""Becoming a rank, and every way in which a rank ends."""

from __future__ import annotations

import logging
import os

from launch.options import Options
from launch.preflight import ensure_torchrun_environment
from launch.serving.ending import end_if_lost, end_now, serving_signals
from launch.serving.lead import Lead
from launch.serving.start import start_rank
from tp_engine.interpreter import freeze_objects
from tp_engine.logs import Phases, setup_logging
from tp_engine.ranks.comm import RankLost
from tp_engine.ranks.liveness import Liveness, Watchdog

log = logging.getLogger(__name__)


def run_rank(options: Options, parent: int) -> int:
    """Serve as the rank that the environment says; the exit code.

    0 after a drain, 1 when the start failed or the service was lost. What a user can mend is one
    line in the log, everything else comes with its traceback.

    Args:
        parent: process that started this one; a rank does not outlive its torchrun.
    """
    config = options.config
    setup_logging(config.log_level, config.log_format, int(os.environ.get("RANK", "0")))
    try:
        environment = ensure_torchrun_environment(os.environ)
        torchrun = parent if environment.torchrun else None
        watchdog = Watchdog(environment.rank, end_now, torchrun=torchrun)
        if environment.rank == 0:
            Lead(options, environment, watchdog).run()
        else:
            follow(options, watchdog)
    except ValueError as error:
        log.error("%s", error)
        log.debug("where it happened", exc_info=True)
        return 1
    except RankLost as error:
        log.warning("%s", error)
        log.debug("where it happened", exc_info=True)
        return 1
    except Exception as error:
        log.critical("where it happened", exc_info=True)
        # Not by way of the interpreter's end: what waits for lost ranks there may wait forever.
        end_now(f"{type(error).__name__}: {error}")
    return 0


def follow(options: Options, watchdog: Watchdog) -> None:
    """Load and carry out plans as a rank ≥ 1, until a plan says that the service has ended.

    Raises:
        RuntimeError: rank 0 or another rank is gone.
    """
    config = options.config.engine
    rank = start_rank(config, Phases())
    rank.comm.gather_numbers([1])
    liveness = Liveness(rank.comm, config.rank_timeout, end_now)
    serving_signals(lambda number: None)
    try:
        rank.worker.follow(watchdog.progress)  # adapters and warm-up take what they take
        freeze_objects()
        watchdog.limit(config.rank_timeout)
        rank.worker.follow(watchdog.progress)
    except RuntimeError:
        end_if_lost(liveness)
        raise
    liveness.close()
