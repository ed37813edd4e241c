"""Logging of every process: text or JSON lines with the rank, and one line for each start phase.

Nothing logs a prompt, an output or a key: messages name requests by id only.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

logger = logging.getLogger(__name__)

_CHATTY = ("transformers", "huggingface_hub", "httpx", "httpcore", "urllib3", "filelock", "asyncio")
_QUIET_VARIABLES = {
    # transformers and huggingface_hub set up their own loggers when they are first imported.
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


def setup_logging(
    level: Literal["debug", "info", "warning", "error"],
    fmt: Literal["text", "json"],
    rank: int,
    stream: TextIO | None = None,
) -> None:
    """Send this process's log to ``stream`` (standard error by default), replacing what was set.

    A record's own data goes in ``extra={"fields": {...}}``: an object of the JSON line, or
    ``key=value`` after the message. Python warnings are logged too; libraries are kept quiet
    below an error, through variables that processes started later inherit.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(rank) if fmt == "json" else TextFormatter(rank))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    for variable, value in _QUIET_VARIABLES.items():
        os.environ.setdefault(variable, value)


class TextFormatter(logging.Formatter):
    """``time LEVEL [rank N] logger: message key=value``; times are UTC."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"%(moment)s %(levelname)-7s [rank {rank}] %(name)s: %(message)s%(tail)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback, which the base class adds."""
        record.moment = _moment(record)
        record.tail = "".join(f" {key}={value}" for key, value in _fields(record).items())
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, rank, message, fields and, if any, exception."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line; values that JSON can't hold are written as text."""
        line = {
            "time": _moment(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "rank": self._rank,
            "message": record.getMessage(),
            "fields": _fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _moment(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


class Phases:
    """The phases of a start: one log line each with its seconds, and word to whoever shows it."""

    def __init__(self, report: Callable[[str], None] | None = None) -> None:
        """``report`` is called with the name of each phase as it begins."""
        self._report = report
        self._start = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run the body as the phase ``name``; an exception passes through, logged as failed."""
        if self._report is not None:
            self._report(name)
        start = time.monotonic()
        try:
            yield
        except BaseException:
            _log_phase(logging.ERROR, name, "failed after", time.monotonic() - start)
            raise
        _log_phase(logging.INFO, name, "took", time.monotonic() - start)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start


def _log_phase(level: int, name: str, outcome: str, seconds: float) -> None:
    fields = {"phase": name, "seconds": round(seconds, 3)}
    logger.log(level, "%s %s %.1f s", name, outcome, seconds, extra={"fields": fields})
