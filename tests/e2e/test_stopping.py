"""A service that is told to stop finishes what is open, and takes nothing new."""

import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.service import Server, wait_until
from tests.helpers.ports import free_port

OPTIONS = ("--served-model-name=base", "--num-pages=600")
pytestmark = pytest.mark.slow


def drain(server: Server, number: signal.Signals) -> None:
    """Stop a service with a stream open; everything that its clients see of it is right."""
    with server.stream(max_tokens=400) as stream:
        stream.read(3)
        server.process.send_signal(number)
        wait_until(lambda: server.status("/ready") == 503, 10, "/ready to say no")
        refused = server.complete(max_tokens=1)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert server.status("/health") == 200
        assert stream.events[-1] != "[DONE]"
        stream.read_all()
        assert stream.whole
        assert stream.choices[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_under_torchrun_drains(
    number: signal.Signals, model: Path, tmp_path: Path
) -> None:
    timeout = 3.0
    with Server(tmp_path, model, *OPTIONS, f"--rank-timeout={timeout:g}") as server:
        server.wait_ready()
        if number is signal.SIGTERM:
            time.sleep(2 * timeout)  # without work ranks hear of each other all the same
        drain(server, number)
        assert server.wait_ended(20) != 0  # torchrun's own word on a signal
        assert "drained; the service has ended" in server.log
        assert "CRITICAL" not in server.log and "[rank 1] ERROR" not in server.log
        assert server.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_single_process_drains_and_exits_with_zero(
    number: signal.Signals, model: Path, tmp_path: Path
) -> None:
    with Server(tmp_path, model, *OPTIONS, ranks=None) as server:
        drain(server.wait_ready(), number)
        assert server.wait_ended(20) == 0
        assert server.leftovers() == []


def test_every_rank_exits_with_zero_after_a_drain(model: Path, tmp_path: Path) -> None:
    port, world = free_port(), {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        zero, one = (
            stack.enter_context(
                Server(
                    tmp_path,
                    model,
                    *OPTIONS,
                    ranks=None,
                    port=port,
                    environment=world | {"RANK": rank, "LOCAL_RANK": rank},
                )
            )
            for rank in ("0", "1")
        )
        zero.wait_ready()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            one.process.send_signal(number)  # ranks other than 0 leave stopping to it
        drain(zero, signal.SIGTERM)
        assert (zero.wait_ended(20), one.wait_ended(20)) == (0, 0)


def test_requests_open_past_the_drain_timeout_get_an_error(model: Path, tmp_path: Path) -> None:
    with (
        Server(tmp_path, model, *OPTIONS, "--drain-timeout=1", ranks=None) as server,
        server.wait_ready().stream(max_tokens=4000) as stream,
    ):
        stream.read(3)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        stream.read_all()
        assert stream.error is not None and stream.error["code"] == "shutting_down"
        assert 0.9 < time.monotonic() - start < 6
        assert server.wait_ended(20) == 0
        assert server.leftovers() == []


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_second_interrupt_ends_at_once(ranks: int | None, model: Path, tmp_path: Path) -> None:
    with (
        Server(tmp_path, model, *OPTIONS, ranks=ranks) as server,
        server.wait_ready().stream(max_tokens=4000) as stream,
    ):
        stream.read(3)
        server.process.send_signal(signal.SIGINT)
        if ranks is None:
            time.sleep(0.1)
            server.process.send_signal(signal.SIGINT)  # one press, delivered twice
        wait_until(lambda: "draining 1 open requests" in server.log, 10, "a drain")
        stream.read(3)
        time.sleep(0.6)
        start = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        stream.read_all()
        assert stream.error is not None and stream.error["code"] == "engine_dead"
        assert server.wait_ended(20) == (130 if ranks is None else 1)
        assert time.monotonic() - start < 8
        assert "interrupted twice" in server.log
        assert server.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_stop_while_loading_leaves_nothing(
    number: signal.Signals, model: Path, tmp_path: Path
) -> None:
    with Server(tmp_path, model, *OPTIONS) as server:
        wait_until(lambda: "front end" in server.processes(), 60, "the front end to start")
        server.signal(1, signal.SIGSTOP)  # the others now wait for it, in native code
        time.sleep(1)
        start = time.monotonic()
        server.process.send_signal(number)
        wait_until(lambda: 0 not in server.processes(), 10, "rank 0 to end")
        server.signal(1, signal.SIGCONT)
        assert server.wait_ended(20) != 0
        assert time.monotonic() - start < 10
        assert "serves base" not in server.log
        assert server.leftovers() == []
