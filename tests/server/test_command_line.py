"""The operators' command line, where there is nothing for it."""

import asyncio
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from launch.adapters import watching
from launch.adapters.__main__ import main
from launch.adapters.arguments import make_parser
from launch.adapters.client import ControlPlane
from server import EngineClient, ServerConfig, create_app
from server.auth import ApiKeys
from tests.server.conftest import serving
from tp_engine.text import Tokenizer

pytestmark = pytest.mark.anyio


async def test_without_operators_there_is_no_control_plane(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code = await asyncio.to_thread(main, ["--url", f"http://127.0.0.1:{port}/v1", "list"])
    assert code == 1
    assert "there is no control plane" in capsys.readouterr().err


def test_common_options_stand_before_the_command_or_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TP_ENGINE_URL", "http://from-environment")
    given = ["--json", "--url", "http://given", "--key-file", "keys"]
    for command in (["list"], ["show", "x"], ["delete", "x"], ["flush"]):
        for line in ([*given, *command], [*command, *given], [*given[:1], *command, *given[1:]]):
            parsed = make_parser().parse_args(line)
            assert (parsed.json, parsed.url, parsed.key_file) == (True, "http://given", "keys")
        parsed = make_parser().parse_args(command)
        assert (parsed.json, parsed.url, parsed.key_file) == (
            *(False, "http://from-environment", None),
        )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (["list", "--limit", "0"], "--limit: '0' must be a whole number from 1 on"),
        (["list", "--limit", "-3"], "--limit: '-3' must be a whole number from 1 on"),
        (["list", "--limit", "many"], "--limit: 'many' must be a whole number from 1 on"),
        (["drain", "x", "--seconds", "nan"], "--seconds: 'nan' must be a number from 0 on"),
        (["drain", "x", "--seconds", "inf"], "--seconds: 'inf' must be a number from 0 on"),
        (["drain", "x", "--seconds", "-1"], "--seconds: '-1' must be a number from 0 on"),
        (["preload", "x", "--tier", "disk"], "invalid choice: 'disk' (choose from"),
    ],
)
def test_a_wrong_number_is_named_with_what_is_allowed(
    line: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2 and reason in capsys.readouterr().err


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://host:x"])
def test_what_is_no_address_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", url, "list"]) == 2
    assert f"--url {url!r}" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_a_key_that_no_header_can_carry_is_refused(
    key: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TP_ENGINE_ADMIN_KEY", key)
    assert main(["list"]) == 2
    told = capsys.readouterr().err
    assert "that in TP_ENGINE_ADMIN_KEY, cannot be sent" in told and key not in told


async def test_a_wrong_key_is_told_apart_from_none(
    client: EngineClient,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = ServerConfig(admin_keys=ApiKeys(["admin"]))
    async with serving(create_app(client, tokenizer, config)) as port:
        url = f"http://127.0.0.1:{port}"
        monkeypatch.setenv("TP_ENGINE_ADMIN_KEY", "")  # as good as none
        assert await asyncio.to_thread(main, ["--url", url, "list"]) == 1
        told = capsys.readouterr().err
        assert "the key is missing: give --key-file, TP_ENGINE_ADMIN_KEY or" in told
        keys = tmp_path / "keys"
        keys.write_text("another")
        assert await asyncio.to_thread(main, ["--url", url, "--key-file", str(keys), "list"]) == 1
        told = capsys.readouterr().err
        assert "incorrect API key" in told and f"the key is that of --key-file {keys}" in told


@pytest.mark.parametrize("status", [200, 302, 502])
def test_another_program_at_the_address_is_told(
    status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stranger(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        code = main(["--url", url, "list"])
        server.shutdown()
        thread.join()
    told = capsys.readouterr().err
    assert code == 1 and f"{url} answers {status}" in told and "no answer of tp-engine" in told


def test_a_directory_without_the_files_is_refused_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for directory, reason in (
        (tmp_path / "none", "none is no directory"),
        (tmp_path, "has no adapter_config.json: adapter_config.json and adapter_model.safetensors"),
    ):
        for command in ("upload", "push"):
            assert main([command, "x", str(directory)]) == 2
            assert reason in capsys.readouterr().err


def test_who_stops_watching_is_told_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running = {"id": "op-7-x", "name": "a", "state": "fetching", "bytes_done": 1, "bytes_total": 9}
    monkeypatch.setattr(ControlPlane, "ask", lambda *_, **__: running)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watching.time, "sleep", interrupt)
    assert main(["watch", "op-7-x"]) == 130
    assert "operation op-7-x goes on in the server: `watch op-7-x`" in capsys.readouterr().err


def test_who_reads_no_further_is_no_error() -> None:
    program = (
        "import sys; from launch.adapters.__main__ import main, ControlPlane\n"
        "ControlPlane.ask = lambda *_, **__: {'id': 'x' * 10**6, 'name': 'a'}\n"
        "sys.exit(main(['--json', 'cancel', 'x']))"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == b"{"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
