"""The front end as a process of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from server import FrontEndSettings
from server.main import _listen, _uvicorn_config
from server.process import start_front_end
from tests.helpers.ports import free_port
from tests.server.fake_engine import FakeEngine
from tp_engine.messages import Draining, Phase

pytestmark = pytest.mark.anyio
CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def settings(socket_directory: Path, model_directory: Path) -> FrontEndSettings:
    return FrontEndSettings(
        to_engine=f"ipc://{socket_directory}/to-engine",
        to_front_end=f"ipc://{socket_directory}/to-front-end",
        parent_pid=os.getpid(),
        model_directory=str(model_directory),
        port=free_port(),
        close_timeout_s=2,
    )


@asynccontextmanager
async def killed_at_exit(
    process: subprocess.Popen[bytes],
) -> AsyncIterator[subprocess.Popen[bytes]]:
    with process:
        try:
            yield process
        finally:
            process.kill()


def running(
    settings: FrontEndSettings,
) -> AbstractAsyncContextManager[subprocess.Popen[bytes]]:
    return killed_at_exit(start_front_end(settings))


async def exit_code(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(process.wait, 15)


async def healthy(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                if (await http.get("/health")).status_code == 200:
                    return
            except httpx.ConnectError:
                await asyncio.sleep(0.1)


def client_of(settings: FrontEndSettings) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", timeout=60)


async def test_process_serves_ignores_stop_signals_drains_and_leaves(
    settings: FrontEndSettings, engine: FakeEngine
) -> None:
    engine.delay = 0.02
    async with running(settings) as process, client_of(settings) as http:
        await healthy(http)
        assert (await http.get("/ready")).status_code == 503
        await engine.send(Phase(name="loading"))
        await engine.announce()
        while (await http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.02)
        body = {"model": "base", "prompt": "ab", "max_tokens": 60}
        answer = asyncio.create_task(http.post("/v1/completions", json=body))
        while not engine.submits:
            await asyncio.sleep(0.02)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            process.send_signal(number)
        await engine.send(Draining())
        assert (await answer).json()["choices"][0]["text"] == "ab" * 30
        async with asyncio.timeout(5):
            await engine.said_goodbye.wait()
        assert await exit_code(process) == 0


@pytest.fixture
def few_files() -> Iterator[None]:
    """A limit on open files as a shell may set it, for the processes that are started."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 1024:
        pytest.skip("the system itself lets nobody open many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_more_may_connect_than_a_shell_would_let(
    settings: FrontEndSettings, engine: FakeEngine, few_files: None
) -> None:
    async with running(settings), client_of(settings) as http:
        await healthy(http)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        opened = [await asyncio.open_connection("127.0.0.1", settings.port) for _ in range(300)]
        async with asyncio.timeout(10):
            for reader, writer in opened[-10:]:
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        for _, writer in opened:
            writer.close()


async def test_what_lies_in_the_working_directory_is_not_imported(
    settings: FrontEndSettings,
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("server", "tp_engine", "msgspec"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    async with running(settings), client_of(settings) as http:
        await healthy(http)


async def test_process_ends_with_its_parent(settings: FrontEndSettings, engine: FakeEngine) -> None:
    engine.delay = 0.02
    # A parent between this process and the front end, which can be killed.
    code = f"""
        import os, dataclasses, time
        from server import FrontEndSettings
        from server.process import start_front_end
        settings = FrontEndSettings.from_json({settings.to_json()!r})
        child = start_front_end(dataclasses.replace(settings, parent_pid=os.getpid()))
        print(child.pid, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=CHECKOUT)
    assert parent.stdout is not None
    async with killed_at_exit(parent), client_of(settings) as http:
        pid = int(await asyncio.to_thread(parent.stdout.readline))
        await healthy(http)
        await engine.announce()
        while (await http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.02)
        body = {"model": "base", "prompt": "ab", "max_tokens": 400, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            parts = response.aiter_text()
            assert "data: " in await anext(parts)
            parent.kill()
            async with asyncio.timeout(5):
                rest = "".join([part async for part in parts])
        assert '"code":"engine_dead"' in rest and "[DONE]" not in rest
        async with asyncio.timeout(10):
            while Path(f"/proc/{pid}").exists() and _state(pid) != "Z":
                await asyncio.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


async def test_logs_hold_neither_keys_nor_prompts(
    settings: FrontEndSettings,
    engine: FakeEngine,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("hush-hush\n", "utf-8")
    settings = dataclasses.replace(settings, api_key_file=str(keys), access_log=True)
    async with running(settings) as process, client_of(settings) as http:
        await healthy(http)
        await engine.announce()
        while (await http.get("/ready")).status_code != 200:
            await asyncio.sleep(0.02)
        for key, status in (("hush-hush", 200), ("hush-what", 401)):
            headers = {"authorization": f"Bearer {key}"}
            body = {"model": "base", "prompt": "my affairs", "max_tokens": 5}
            answer = await http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == status
        await engine.send(Draining())
        assert await exit_code(process) == 0
    log = capfd.readouterr().err
    assert '"POST /v1/completions HTTP/1.1" 200' in log
    assert '"POST /v1/completions HTTP/1.1" 401' in log
    assert "hush" not in log and "affairs" not in log


async def test_small_writes_wait_for_no_acknowledgement() -> None:
    with _listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_taken_port_is_a_clear_error(
    settings: FrontEndSettings, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", settings.port)):
        async with running(settings) as process:
            assert await exit_code(process) == 1
    message = capfd.readouterr().err
    assert f"port={settings.port}" in message and "in use" in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    ("field", "option"),
    [
        ("chat_template_file", "chat_template"),
        ("api_key_file", "api_key_file"),
        ("admin_key_file", "admin_key_file"),
    ],
)
async def test_a_missing_file_is_a_clear_error(
    field: str, option: str, settings: FrontEndSettings, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = dataclasses.replace(settings, **{field: "/no/such"})
    async with running(wrong) as process:
        assert await exit_code(process) == 1
    message = capfd.readouterr().err
    assert f" {option}='/no/such'" in message and "Traceback" not in message


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", 65536), ("max_body_bytes", 0), ("max_open_requests", 0), ("keep_alive_s", 0)],
)
async def test_settings_are_checked(settings: FrontEndSettings, field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{field}={value}"):
        dataclasses.replace(settings, **{field: value})


async def test_idle_connections_outlive_a_proxy_s_unless_told(settings: FrontEndSettings) -> None:
    assert settings.keep_alive_s > 60
    config = _uvicorn_config(FastAPI(), dataclasses.replace(settings, keep_alive_s=7))
    assert config.timeout_keep_alive == 7


async def test_settings_survive_the_way_to_the_process(settings: FrontEndSettings) -> None:
    assert FrontEndSettings.from_json(settings.to_json()) == settings


async def test_starting_a_process_imports_no_web_framework() -> None:
    code = "import sys, server.process; print({'fastapi', 'zmq', 'uvicorn'} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, check=True)
    assert done.stdout.strip() == "set()"


async def test_the_process_never_imports_torch(model_directory: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        import server.main
        assert not {{"torch", "transformers"}} & set(sys.modules)
        server.main._hide_torch()
        from tp_engine.text import Tokenizer
        print(Tokenizer.load(Path({str(model_directory)!r})).encode("a"), sys.modules["torch"])
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("None") and done.stderr == ""
