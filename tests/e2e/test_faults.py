"""Every process of a service dies or hangs once: clients are told, and nothing stays behind."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.service import Role, Server, wait_until

RANK_TIMEOUT = 8.0
PROMPT = [7] * 3000
"""Takes hundreds of steps with `OPTIONS`."""
OPTIONS = (
    "--served-model-name=base",
    f"--rank-timeout={RANK_TIMEOUT:g}",
    "--num-pages=600",
    "--max-num-seqs=4",
    "--max-num-batched-tokens=4",
)
pytestmark = pytest.mark.slow


@contextmanager
def three_ranks(directory: Path, model: Path) -> Iterator[Server]:
    with Server(directory, model, *OPTIONS, ranks=3) as server:
        yield server.wait_ready()


FAULT = """
import os, runpy, sys, time
sys.path.insert(0, os.getcwd())
from tp_engine.steps.runner import Runner
execute, calls = Runner.execute, 0

def faulty(self, plan):
    global calls
    calls += 1
    if calls == 40 and os.environ["RANK"] == "{rank}":
        {fault}
    return execute(self, plan)

Runner.execute = faulty
sys.argv[0] = "launch/serve.py"
runpy.run_path("launch/serve.py", run_name="__main__")
"""
"""serve.py, with a fault in the middle of one rank's work."""


def check_end(server: Server, start: float, reason: str) -> None:
    """The service ended loudly and in time, and left nothing."""
    code = server.wait_ended(RANK_TIMEOUT + 10)
    assert code != 0
    assert time.monotonic() - start < RANK_TIMEOUT + 4
    assert reason in server.log
    assert server.leftovers() == []


def reason_for(victim: Role) -> str:
    if victim == 0:
        return "rank 0 is gone"
    if victim == "front end":
        return "the HTTP front end ended with exit code -9"
    return f"the service ends: rank {victim} is gone"


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_killed_while_it_works_fails_open_requests(
    victim: int, model: Path, tmp_path: Path
) -> None:
    with three_ranks(tmp_path, model) as server, ThreadPoolExecutor() as pool:
        with server.stream(max_tokens=3000) as decoding:
            decoding.read(3)
            prefilling = pool.submit(server.complete, prompt=PROMPT, max_tokens=1)
            queued = pool.submit(open_stream, server)
            wait_until(lambda: server.open_requests == 3, 20, "three requests in the engine")
            start = time.monotonic()
            server.signal(victim, signal.SIGKILL)
            decoding.read_all()
            assert decoding.error is not None, decoding.events[-3:]
            assert decoding.error["code"] == "engine_dead"
            for answer in (prefilling.result(10), queued.result(10)):
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "engine_dead"
            assert time.monotonic() - start < RANK_TIMEOUT
        check_end(server, start, reason_for(victim))


def open_stream(server: Server) -> httpx.Response:
    """A stream whose prompt is never through: its answer has not begun when the rank dies."""
    with server.stream(prompt=PROMPT[1:]) as stream:
        stream.response.read()
        return stream.response


def test_a_front_end_killed_while_it_works_breaks_connections(model: Path, tmp_path: Path) -> None:
    with three_ranks(tmp_path, model) as server, ThreadPoolExecutor() as pool:
        with server.stream(max_tokens=3000) as decoding:
            decoding.read(3)
            prefilling = pool.submit(server.complete, prompt=PROMPT, max_tokens=1)
            wait_until(lambda: server.open_requests == 2, 20, "two requests in the engine")
            start = time.monotonic()
            server.signal("front end", signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                decoding.read_all()
            with pytest.raises(httpx.TransportError):
                prefilling.result(10)
        check_end(server, start, reason_for("front end"))


@pytest.mark.parametrize("victim", [0, 1, 2, "front end"])
def test_a_process_killed_while_idle_ends_the_service(
    victim: Role, model: Path, tmp_path: Path
) -> None:
    with three_ranks(tmp_path, model) as server:
        start = time.monotonic()
        server.signal(victim, signal.SIGKILL)
        check_end(server, start, reason_for(victim))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_hangs_is_found_named_and_removed(
    victim: int, model: Path, tmp_path: Path
) -> None:
    with three_ranks(tmp_path, model) as server, server.stream(max_tokens=3000) as stream:
        stream.read(3)
        start = time.monotonic()
        server.signal(victim, signal.SIGSTOP)
        stream.read_all()
        assert stream.error is not None and stream.error["code"] == "engine_dead"
        check_end(server, start, f"rank {victim} was silent for")


def test_ranks_do_not_outlive_torchrun(model: Path, tmp_path: Path) -> None:
    with three_ranks(tmp_path, model) as server, server.stream(max_tokens=3000) as stream:
        stream.read(3)
        start = time.monotonic()
        server.signal("torchrun", signal.SIGKILL)
        stream.read_all()
        assert stream.error is not None and stream.error["code"] == "engine_dead"
        check_end(server, start, "torchrun is gone")


@pytest.mark.parametrize("ranks", [None, 2])
def test_an_error_in_the_serving_loop_fails_open_requests(
    ranks: int | None, model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAULT.format(rank=0, fault="raise ValueError('a fault of the test')"))
    with Server(tmp_path, model, *OPTIONS, ranks=ranks, script=str(script)) as server:
        with server.wait_ready().stream(max_tokens=3000) as stream:
            start = time.monotonic()
            stream.read_all()
        assert stream.error is not None and stream.error["code"] == "engine_dead"
        assert "a fault of the test" not in stream.error["message"]
        check_end(server, start, "ValueError: a fault of the test")
        assert "Traceback" in server.log


def test_a_rank_whose_work_hangs_is_named(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAULT.format(rank=1, fault="time.sleep(1000)"))
    with Server(tmp_path, model, *OPTIONS, script=str(script)) as server:
        with server.wait_ready().stream(max_tokens=3000) as stream:
            stream.read(20)
            start = time.monotonic()
            stream.read_all()
        assert stream.error is not None and stream.error["code"] == "engine_dead"
        check_end(server, start, "[rank 0] launch.serving.ending: the service ends: rank 1 is gone")
        assert "rank 1 made no progress for" in server.log
        assert "time.sleep(1000)" in server.log or "in faulty" in server.log


SHORT_LEAVE = """
import os, runpy, sys
sys.path.insert(0, os.getcwd())
import launch.serving.lead
launch.serving.lead.LEAVE_SECONDS = 2.0
sys.argv[0] = "launch/serve.py"
runpy.run_path("launch/serve.py", run_name="__main__")
"""
"""serve.py, with less patience for a front end that does not leave."""


def test_a_front_end_that_hangs_does_not_hold_the_end(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SHORT_LEAVE)
    options = (*OPTIONS, "--drain-timeout=1")
    with Server(tmp_path, model, *options, ranks=None, script=str(script)) as server:
        server.wait_ready().signal("front end", signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_ended(20) == 0
        assert "did not leave within 2 s" in server.log
        assert server.leftovers() == []
