"""Logs: one line a record, with the rank; phases are timed and reported."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tp_engine.logs import Phases, setup_logging

ROOT = Path(__file__).parents[2]
LOG = logging.getLogger("tp_engine.somewhere")


@pytest.fixture(autouse=True)
def restored_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(os, "environ", dict(os.environ))
    root.handlers.clear()
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def json_lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_hold_time_level_logger_rank_message_and_fields() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", 3, stream)
    LOG.info("loaded %d", 2, extra={"fields": {"pages": 7, "path": Path("/x")}})
    (line,) = json_lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line.pop("time")))
    assert line == {
        "level": "info",
        "logger": "tp_engine.somewhere",
        "rank": 3,
        "message": "loaded 2",
        "fields": {"pages": 7, "path": "/x"},
    }


def test_json_stays_on_one_line_with_newlines_and_exceptions() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", 0, stream)
    try:
        raise OSError("disk\nfull")
    except OSError:
        LOG.exception("two\nlines")
    (line,) = json_lines(stream)
    assert line["message"] == "two\nlines"
    assert "OSError: disk\nfull" in str(line["exception"])
    assert line["fields"] == {}


def test_text_shows_rank_and_fields_and_keeps_the_traceback() -> None:
    stream = io.StringIO()
    setup_logging("info", "text", 12, stream)
    LOG.warning("slow", extra={"fields": {"seconds": 1.5}})
    try:
        raise OSError("disk full")
    except OSError:
        LOG.exception("broken")
    first, second, *rest = stream.getvalue().splitlines()
    assert first.endswith(" WARNING [rank 12] tp_engine.somewhere: slow seconds=1.5")
    assert second.endswith(" ERROR   [rank 12] tp_engine.somewhere: broken")
    assert rest[-1] == "OSError: disk full"


def test_levels_below_the_chosen_one_are_dropped_and_a_second_setup_replaces_the_first() -> None:
    old, new = io.StringIO(), io.StringIO()
    setup_logging("debug", "text", 0, old)
    setup_logging("warning", "text", 0, new)
    LOG.info("quiet")
    LOG.warning("loud")
    assert old.getvalue() == ""
    assert [line.split()[-1] for line in new.getvalue().splitlines()] == ["loud"]


def test_python_warnings_are_logged() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", 0, stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old name", FutureWarning, stacklevel=1)
    logged = [line for line in json_lines(stream) if line["logger"] == "py.warnings"]
    assert len(logged) == 1
    assert "FutureWarning: old name" in str(logged[0]["message"])


def test_libraries_stay_quiet_when_they_are_imported_later() -> None:
    script = """
from tp_engine.logs import setup_logging
setup_logging("info", "text", 0)
from transformers.utils import logging as theirs
import huggingface_hub.utils.logging as hub
theirs.get_logger("transformers.models.llama").warning("chatter")
hub.get_logger("huggingface_hub.file_download").warning("chatter")
theirs.get_logger("transformers.models.llama").error("real trouble")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "real trouble" in done.stderr
    assert "chatter" not in done.stdout + done.stderr


def test_a_phase_is_reported_as_it_begins_and_logged_once_with_its_seconds() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", 0, stream)
    seen: list[str] = []
    phases = Phases(seen.append)
    with phases.phase("reading weights"):
        assert seen == ["reading weights"]
        assert stream.getvalue() == ""
    with phases.phase("loading adapters"):
        pass
    first, second = json_lines(stream)
    assert seen == ["reading weights", "loading adapters"]
    assert re.fullmatch(r"reading weights took \d+\.\d s", str(first["message"]))
    fields = first["fields"]
    assert isinstance(fields, dict)
    assert fields["phase"] == "reading weights"
    assert 0 <= fields["seconds"] <= phases.seconds
    assert str(second["message"]).startswith("loading adapters took ")


def test_a_failed_phase_is_logged_as_such_and_its_exception_passes() -> None:
    stream = io.StringIO()
    setup_logging("info", "json", 0, stream)
    with pytest.raises(KeyError), Phases().phase("reading weights"):
        raise KeyError("model.norm.weight")
    (line,) = json_lines(stream)
    assert line["level"] == "error"
    assert str(line["message"]).startswith("reading weights failed after ")
