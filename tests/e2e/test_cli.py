"""``python -m launch.adapters`` against a real service."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launch.adapters.__main__ import main
from tests.e2e.service import ROOT, Server
from tests.helpers.ports import free_port
from tests.helpers.tiny_models import make_peft_adapter
from tests.sources.web import CONFIG, WEIGHTS, Web, web_server

pytestmark = pytest.mark.slow


class Done(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture(scope="module")
def root(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that operators may load from: adapters ``a`` and ``b``."""
    path = tmp_path_factory.mktemp("root")
    for seed, name in enumerate("ab"):
        make_peft_adapter(path / name, model, r=3 + seed, seed=seed + 80)
    return path


@pytest.fixture(scope="module")
def web(root: Path) -> Iterator[Web]:
    with web_server() as web:
        for name in (CONFIG, WEIGHTS):
            web.files[f"team/b/{name}"] = (root / "b" / name).read_bytes()
        yield web


@pytest.fixture(scope="module")
def server(
    model: Path, root: Path, web: Web, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("service")
    (directory / "keys").write_text("# operators\nsk-admin\n")
    options = (
        "--served-model-name=base",
        "--num-pages=80",
        f"--admin-key-file={directory / 'keys'}",
        f"--adapter-root={root}",
        f"--adapter-store={directory / 'store'}",
        f"--adapter-source={web.url}/team",
    )
    with Server(directory, model, *options, ranks=None) as server:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.log, server.log


@pytest.fixture
def cli(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process."""
    monkeypatch.setenv("TP_ENGINE_URL", server.url)
    monkeypatch.setenv("TP_ENGINE_ADMIN_KEY", "sk-admin")

    def run(*arguments: str) -> Done:
        code = main(arguments)
        return Done(code, *capsys.readouterr())

    return run


def listed(cli: Run, *options: str) -> dict[str, Any]:
    done = cli("--json", "list", *options)
    assert done.code == 0, done.err
    return {each["name"]: each for each in json.loads(done.out)}


def test_an_adapters_life(cli: Run, root: Path) -> None:
    done = cli("load", "team/x", str(root / "a"))
    assert done.code == 0 and "'team/x' added successfully" in done.out
    assert "14 of 14 modules applied" in done.out
    first = listed(cli)["team/x"]["revision"]
    refused = cli("load", "team/x", str(root / "b"))
    assert refused.code == 1 and "is loaded" in refused.err and "adapter_exists" in refused.err
    assert cli("load", "team/x", str(root / "b"), "--replace").code == 0
    second = listed(cli)["team/x"]["revision"]
    assert cli("rollback", "team/x").code == 0 and listed(cli)["team/x"]["revision"] == first
    assert cli("promote", "team/x", second[:12]).code == 0, "as lists show it"
    assert listed(cli)["team/x"]["revision"] == second
    shown = cli("show", "team/x")
    assert shown.code == 0
    for text in ("team/x", second, first, "q_proj", "manifest.base_digest", "[4, 64]"):
        assert text in shown.out, shown.out
    assert cli("preload", "team/x").code == 0
    assert listed(cli)["team/x"]["resident"] and "arena" in cli("list").out
    for command in ("pin", "drain", "resume", "unpin"):
        assert cli(command, "team/x").code == 0
        flags = listed(cli)["team/x"]
        assert flags["pinned"] is (command in ("pin", "drain", "resume"))
        assert flags["state"] == ("draining" if command == "drain" else "ready")
    table = cli("list", "--prefix", "team/").out.splitlines()
    assert table[0].split()[:3] == ["name", "state", "revision"] and len(table) == 2
    assert table[1].split()[:3] == ["team/x", "ready", second[:12]]
    assert cli("unload", "team/x").code == 0 and listed(cli) == {}
    gone = cli("show", "team/x")
    assert gone.code == 1 and "'team/x' is not loaded" in gone.err


def test_a_remote_adapter_is_watched_to_its_end(cli: Run, web: Web) -> None:
    done = cli("load", "far", f"{web.url}/team/b")
    assert done.code == 0 and "'far' added successfully" in done.out
    assert listed(cli, "--state", "ready")["far"]["source"] == f"{web.url}/team/b"
    wrong = cli("load", "sum", f"{web.url}/team/b", "--sha256", f"{WEIGHTS}={'0' * 64}")
    assert wrong.code == 1 and "checksum_mismatch" in wrong.err
    missing = cli("load", "none", f"{web.url}/team/none")
    assert missing.code == 1 and "answers 404" in missing.err
    outside = cli("load", "out", "https://example.org/x")
    assert outside.code == 1 and "not below an --adapter-source" in outside.err
    table = cli("operations", "--name", "sum").out
    assert "failed" in table and "has SHA-256" in table
    assert cli("delete", "far").code == 0


def test_a_fetch_is_begun_watched_and_cancelled(cli: Run, web: Web) -> None:
    web.gate.clear()
    begun = cli("--json", "load", "slow", f"{web.url}/team/b", "--no-wait")
    assert begun.code == 0
    number = json.loads(begun.out)["id"]
    assert listed(cli, "--state", "fetching")["slow"]["operation"] == number
    assert cli("cancel", number).code == 0
    ended = cli("watch", number)
    assert ended.code == 1 and "cancelled" in ended.err
    begun = cli("load", "slow", f"{web.url}/team/b", "--no-wait")
    assert begun.code == 0 and "is fetching" in begun.out
    timer = threading.Timer(0.5, web.gate.set)
    timer.start()
    number = begun.out.split()[2]
    watched = cli("--json", "watch", number)
    assert watched.code == 0
    done = json.loads(watched.out)
    assert done["state"] == "ready" and done["bytes_done"] == done["bytes_total"] > 10_000
    assert cli("cancel", number).code == 0  # it has ended: harmless
    assert cli("unload", "slow").code == 0
    nothing = cli("watch", "op-0-none")
    assert nothing.code == 1 and "operation_not_found" in nothing.err


def test_a_directory_of_this_machine_is_uploaded(cli: Run, root: Path, tmp_path: Path) -> None:
    done = cli("upload", "mine", str(root / "b"))
    assert done.code == 0 and "'mine' added successfully" in done.out
    assert listed(cli)["mine"]["source"] == "uploaded"
    assert cli("upload", "mine", str(root / "a"), "--replace").code == 0
    nothing = cli("upload", "other", str(tmp_path))
    assert nothing.code == 2 and "has no adapter_config.json" in nothing.err
    assert cli("unload", "mine").code == 0


def test_what_is_pushed_is_served_and_flushed(cli: Run, root: Path) -> None:
    done = cli("push", "trained", str(root / "a"))
    assert done.code == 0 and "'trained' pushed successfully" in done.out
    first = listed(cli)["trained"]
    assert first["dirty"] and first["source"] == "pushed"
    assert cli("flush", "trained").code == 0
    assert not listed(cli)["trained"]["dirty"] and "nothing was to be" in cli("flush").out
    assert cli("unload", "trained").code == 0


def test_what_goes_wrong_has_a_reason_and_a_code(
    cli: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert cli("load", "x", "/srv", "--sha256", "odd").code == 2
    assert cli("--key-file", str(tmp_path / "none"), "list").code == 2
    keys = tmp_path / "keys"
    keys.write_text("# only a comment\n\n")
    empty = cli("--key-file", str(keys), "list")
    assert empty.code == 2 and "holds no key" in empty.err
    keys.write_text("\nwrong\n")
    wrong = cli("--key-file", str(keys), "list")
    assert wrong.code == 1 and "incorrect API key" in wrong.err
    assert cli("--url", "localhost:8000", "list").code == 2
    nobody = cli("--url", f"http://127.0.0.1:{free_port()}", "list")
    assert nobody.code == 3 and "no answer from" in nobody.err
    monkeypatch.delenv("TP_ENGINE_ADMIN_KEY")
    none = cli("list")
    assert none.code == 1 and "no API key" in none.err
    keys.write_text("sk-admin\n")
    monkeypatch.setenv("TP_ENGINE_ADMIN_KEY_FILE", str(keys))
    assert cli("list").code == 0
    with pytest.raises(SystemExit) as usage:
        cli("juggle")
    assert usage.value.code == 2


def test_it_is_a_program(server: Server) -> None:
    command = [sys.executable, "-m", "launch.adapters", "--url", server.url, "--json", "list"]
    environment = {"TP_ENGINE_ADMIN_KEY": "sk-admin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {each["state"] for each in json.loads(done.stdout)} <= {"failed"}
