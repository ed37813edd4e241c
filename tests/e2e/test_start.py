"""A start that cannot work says why in one line, soon, and leaves nothing; one that works tells
what it is doing meanwhile."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.preflight import claim_store
from tests.e2e.conftest import ADAPTERS
from tests.e2e.service import HOST, ROOT, SCRIPT, Server, wait_until
from tests.helpers.tiny_models import make_checkpoint

pytestmark = pytest.mark.slow

ONE_RANKS_MODEL = """
import os, runpy, sys
sys.path.insert(0, os.path.abspath("launch"))
if os.environ["RANK"] == "1":
    sys.argv.append("--model={other}")
sys.argv[0] = "launch/serve.py"
runpy.run_path("launch/serve.py", run_name="__main__")
"""
"""serve.py, with a model of its own for rank 1: what one damaged disk of many hosts looks like."""


def check_refused(server: Server, *words: str) -> None:
    """The start ends soon, with one line that has all the words."""
    start = time.monotonic()
    assert server.wait_ended(60) != 0
    errors = [
        line for line in server.log.splitlines() if " ERROR " in line and "failed after" not in line
    ]
    assert len(errors) == 1, server.log
    assert all(word in errors[0] for word in words), errors[0]
    own = server.log.partition("elastic/multiprocessing")[0]
    assert "Traceback" not in own
    assert time.monotonic() - start < 40
    assert server.leftovers() == []


@pytest.mark.parametrize("ranks", [None, 2])
def test_a_taken_port_is_refused(ranks: int | None, model: Path, tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with Server(tmp_path, model, ranks=ranks, port=port) as server:
            check_refused(server, f"port {port} on {HOST} is in use", "--port")


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with Server(tmp_path, tmp_path / "nothing", ranks=None) as server:
        check_refused(server, str(tmp_path / "nothing"))


def test_a_store_that_another_server_uses_is_refused(model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with claim_store(store), Server(tmp_path, model, f"--adapter-store={store}") as server:
        check_refused(server, f"--adapter-store {store} is in use by another server")
    assert [path.name for path in store.iterdir()] == ["lock"], "the other one's is left alone"


def test_a_wrong_option_is_refused_by_one_rank_alone(model: Path, tmp_path: Path) -> None:
    with Server(tmp_path, model, "--rank-timeout=soon") as server:
        assert server.wait_ended(60) != 0
        assert server.log.count("serve.py: error: --rank-timeout: 'soon' is not a number") == 1


@pytest.fixture
def broken_adapter(adapters: Path, tmp_path: Path) -> Path:
    """An adapter for another model: one of its tensors has another shape."""
    path = tmp_path / "broken"
    shutil.copytree(adapters / ADAPTERS[0], path)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"r": 3}))
    return path


def test_a_bad_adapter_ends_the_start(model: Path, broken_adapter: Path, tmp_path: Path) -> None:
    with Server(tmp_path, model, "--lora", f"bad={broken_adapter}") as server:
        check_refused(server, "bad", "lora_A")


def test_a_bad_adapter_can_be_left_out(
    model: Path, adapters: Path, broken_adapter: Path, tmp_path: Path
) -> None:
    options = ("--served-model-name=base", "--lora-on-error=skip", "--num-pages=200")
    named = ("--lora", f"bad={broken_adapter}", f"good={adapters / ADAPTERS[0]}")
    with Server(tmp_path, model, *options, *named, ranks=None) as server:
        server.wait_ready()
        assert [line for line in server.log.splitlines() if " ERROR " in line and "bad" in line]
        models = server.http.get("/v1/models").json()["data"]
        assert [each["id"] for each in models] == ["base", "good"]
        assert server.complete(model="good", max_tokens=2).status_code == 200
        assert server.complete(model="bad", max_tokens=2).status_code == 404


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_rank_that_cannot_load_ends_the_whole_start(
    damage: str, model: Path, tmp_path: Path
) -> None:
    other = make_checkpoint(
        tmp_path / "other", "llama", tokenizer=True, sharded=True, max_position_embeddings=4096
    )
    shard = sorted(other.glob("*.safetensors"))[1]
    if damage == "missing":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-100])
    script = tmp_path / "script.py"
    script.write_text(ONE_RANKS_MODEL.format(other=other))
    with Server(tmp_path, model, "--num-pages=200", script=str(script)) as server:
        start = time.monotonic()
        assert server.wait_ended(60) != 0
        assert time.monotonic() - start < 40
        refusals = [line for line in server.log.splitlines() if "ERROR   [rank 1]" in line]
        assert shard.name in refusals[-1]
        assert server.leftovers() == []


@pytest.mark.parametrize(
    ("flag", "word"), [("--help", "--rank-timeout"), ("--version", "tp-engine")]
)
def test_help_and_version_do_not_wait_for_torch(flag: str, word: str) -> None:
    code = f"""
import runpy, sys
sys.argv = [{SCRIPT!r}, {flag!r}]
try:
    runpy.run_path({SCRIPT!r}, run_name="__main__")
except SystemExit as end:
    print("torch" in sys.modules, "fastapi" in sys.modules, end.code)
"""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert word in done.stdout
    assert done.stdout.splitlines()[-1] == "False False 0", done
    assert time.monotonic() - start < 10


def test_the_phase_of_a_start_is_told_and_health_is_good(model: Path, tmp_path: Path) -> None:
    with Server(tmp_path, model, "--served-model-name=base", "--num-pages=200") as server:
        wait_until(lambda: "front end" in server.processes(), 60, "the front end to start")
        server.signal(1, signal.SIGSTOP)
        wait_until(lambda: server.status("/health") == 200, 60, "/health")
        health = server.http.get("/health").json()
        assert health["status"] == "ok"
        assert health["phase"] != "ready"
        ready = server.http.get("/ready")
        assert ready.status_code == 503
        assert health["phase"] in ready.json()["error"]["message"]
        early = server.complete(max_tokens=1)
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "not_ready"
        server.signal(1, signal.SIGCONT)
        server.wait_ready()
        assert server.http.get("/health").json()["phase"] == "ready"
        assert server.complete(max_tokens=1).status_code == 200
