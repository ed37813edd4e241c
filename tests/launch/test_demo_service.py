"""The demo's server process: waited for, found dead, and stopped with its children."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launch.demo.__main__ import parse
from launch.demo.batch import ask_all
from launch.demo.service import HOST, Service, ServiceError, choose_port, serve_command

FAKE_SERVER = Path(__file__).parent / "demo_fake_server.py"
# As under torchrun, the process that was started only waits for the one that serves.
LAUNCHER = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))"


def fake_server(port: int, *options: str) -> list[str]:
    return [sys.executable, "-c", LAUNCHER, str(FAKE_SERVER), str(port), *options]


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        number: int = probe.getsockname()[1]
        return number


@pytest.fixture
def url(port: int) -> Iterator[str]:
    with Service(fake_server(port), port) as service:
        service.wait_ready(30.0)
        yield service.url


def test_readiness_is_waited_for_and_stopping_takes_the_children_along(port: int) -> None:
    with Service(fake_server(port, "--child"), port) as service:
        service.wait_ready(30.0)
        family = psutil.Process(service._process.pid).children(recursive=True)
        assert len(family) == 2
    assert not any(process.is_running() for process in family)


def test_a_server_that_dies_ends_the_wait(port: int) -> None:
    service = Service([sys.executable, "-c", "raise SystemExit(3)"], port)
    with pytest.raises(ServiceError, match="exit code 3"):
        service.wait_ready(30.0)


def test_a_server_that_never_gets_ready_ends_the_wait(port: int) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with Service(command, port) as service, pytest.raises(ServiceError, match="not ready within"):
        service.wait_ready(0.5)


def test_a_process_that_ignores_the_signal_is_killed_and_reported(port: int) -> None:
    service = Service(fake_server(port, "--stubborn"), port)
    service.wait_ready(30.0)
    with pytest.raises(ServiceError, match="had to kill 2"):
        service.stop(timeout_s=0.5)
    assert not psutil.pid_exists(service._process.pid)


def test_a_batch_is_put_together_from_its_streams(url: str) -> None:
    answers = ask_all(url, ["one", "two"], "Where?")
    assert [a.model for a in answers] == ["one", "two"]
    assert [a.text for a in answers] == ["one: Where?", "two: Where?"]
    assert [a.tokens for a in answers] == [2, 2]
    assert [a.error for a in answers] == [None, None]


def test_one_failed_request_is_told_and_hurts_no_other(url: str) -> None:
    unknown, broken, good = ask_all(url, ["unknown", "broken", "one"], "Where?")
    assert unknown.error is not None and unknown.error.startswith("HTTP 404")
    assert broken.error is not None and "out of pages" in broken.error
    assert (good.text, good.error) == ("one: Where?", None)


def test_no_server_is_an_error_in_every_answer(port: int) -> None:
    [answer] = ask_all(f"http://{HOST}:{port}", ["one"], "Where?")
    assert answer.error is not None and answer.error.startswith("ConnectError")


def test_a_taken_port_is_avoided_or_refused() -> None:
    with socket.socket() as listener:
        listener.bind((HOST, choose_port(None)))
        taken = listener.getsockname()[1]
        listener.listen()
        assert choose_port(None) != taken
        with pytest.raises(ServiceError, match=f"port {taken}"):
            choose_port(taken)


def test_the_command_names_every_adapter() -> None:
    adapters = {"json": Path("/a/json"), "letter": Path("/a/letter")}
    command = serve_command(model=Path("/m"), names=["base"], adapters=adapters, ranks=3, port=81)
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert {"--nproc-per-node=3", "--model=/m", "--served-model-name=base"} <= set(command)
    assert {"--port=81", "--lora=json=/a/json", "--lora=letter=/a/letter"} <= set(command)
    script = next(word for word in command if word.endswith("serve.py"))
    assert command.index("--standalone") < command.index(script) < command.index("--model=/m")


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_driver_stops_the_server(port: int, stop: signal.Signals) -> None:
    code = (
        "import signal\n"
        "from launch.demo.service import Service\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        f"with Service({fake_server(port)!r}, {port}) as service:\n"
        "    service.wait_ready(30.0)\n"
        "    print(service._process.pid, flush=True)\n"
        "    service.wait()\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    assert driver.stdout is not None
    server = int(driver.stdout.readline())
    os.kill(driver.pid, stop)
    driver.communicate(timeout=30)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(server)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--ranks=two", "--ranks: 'two' must be a whole number from 1 on"),
        ("--ranks=0", "--ranks: '0' must be a whole number from 1 on"),
        ("--port=70000", "--port: '70000' must be a whole number from 1 to 65535"),
        ("--port=http", "--port: 'http' must be a whole number from 1 to 65535"),
    ],
)
def test_a_wrong_option_is_named(
    option: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([option])
    assert ended.value.code == 2 and reason in capsys.readouterr().err
