"""Adapters pushed by a training loop to a service of two ranks, which is killed and stopped."""

import json
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.service import Server, wait_until
from tests.e2e.test_adapters import PROMPT, TOKENS, admin, load, says, start
from tests.helpers.tiny_models import make_peft_adapter, oracle_greedy
from tp_engine.text import Tokenizer

FILES = ("adapter_config.json", "adapter_model.safetensors")
pytestmark = pytest.mark.slow


def push(server: Server, name: str, adapter: Path) -> httpx.Response:
    """As a training loop does it."""
    files = {file: (adapter / file).read_bytes() for file in FILES}
    return admin(server, "POST", f"/{name}/tensors", files=files)


def show(server: Server, name: str) -> dict[str, Any]:
    answer = admin(server, "GET", f"/{name}")
    assert answer.status_code == 200, answer.text
    status: dict[str, Any] = answer.json()
    return status


def begin(directory: Path, model: Path, root: Path) -> Server:
    store = f"--adapter-store={directory / 'store'}"
    return start(directory, model, root, store, "--flush-interval=0", "--max-body-bytes=20KiB")


def files_below(store: Path) -> set[str]:
    """The revisions on disk, and whatever else is left there but the index."""
    found = {str(path.relative_to(store)) for path in store.glob("*/*") if path.is_dir()}
    return found - {"fetching/claims", "fetching/idle"}


def test_what_was_durable_outlasts_a_kill_and_a_stop_writes_the_rest(
    model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    tokenizer = Tokenizer.load(model)
    paths = {n: make_peft_adapter(root / n, model, r=4, seed=70 + i) for i, n in enumerate("abcd")}
    right = {
        name: tokenizer.decode(oracle_greedy(model, PROMPT, TOKENS, path))
        for name, path in paths.items()
    }
    assert len(set(right.values())) == 4
    with begin(tmp_path, model, root) as server:
        server.wait_ready()
        load(server, "x", paths["a"])
        fields = {"model": "x", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}
        with server.stream(**fields) as running:
            running.read(3)
            pushed = push(server, "x", paths["b"]).json()
            assert pushed["durable"] is False and pushed["modules_applied"] == 14
            assert says(server, "x") == right["b"], "served at once"
            running.read_all()
        assert running.whole and running.text().startswith(right["a"]), "and not before"
        assert show(server, "x")["dirty"] and show(server, "x")["manifest"] is None
        assert admin(server, "POST", "/x/flush").json() == {"written": ["x"]}
        assert not show(server, "x")["dirty"]
        assert push(server, "x", paths["b"]).json()["durable"] is True, "there is nothing new"
        assert push(server, "x", paths["c"]).json()["durable"] is False
        assert says(server, "x") == right["c"]
        for process in server.processes().values():
            process.send_signal(signal.SIGKILL)
    with begin(tmp_path, model, root) as server:
        server.wait_ready()
        assert says(server, "x") == right["b"], "the last that was durable"
        assert len(files_below(tmp_path / "store")) == 2, "a and b"
        for step in ("c", "d", "c"):
            assert push(server, "x", paths[step]).status_code == 200
        assert push(server, "new", paths["d"]).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        server.wait_ended(30)
        assert "drained; the service has ended" in server.log and "lost" not in server.log
    with begin(tmp_path, model, root) as server:
        server.wait_ready()
        assert says(server, "x") == right["c"]
        last, first = show(server, "x")["history"]
        assert admin(server, "POST", "/x/roll_back").json()["revision"] == first
        assert says(server, "x") == right["a"]
        _refused_pushes_and_drains(server, paths, right, last)
        assert says(server, "new") == right["d"]
        for name in ("x", "new"):
            assert admin(server, "DELETE", f"/{name}").status_code == 200
        wait_until(lambda: not files_below(tmp_path / "store"), 10, "no files")


def _refused_pushes_and_drains(
    server: Server, paths: dict[str, Path], right: dict[str, str], revision: str
) -> None:
    body = {FILES[0]: (paths["a"] / FILES[0]).read_bytes()}
    missing = admin(server, "POST", "/x/tensors", files=body)
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, FILES[1])
    config = json.loads(body[FILES[0]]) | {"r": 5}
    body = {FILES[0]: json.dumps(config).encode(), FILES[1]: (paths["a"] / FILES[1]).read_bytes()}
    wrong = admin(server, "POST", "/x/tensors", files=body)
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "shape_mismatch")
    assert says(server, "x") == right["a"]
    # What is drained answers 503 until it is resumed, whatever it means meanwhile.
    assert admin(server, "POST", "/x/drain").json()["revision"] != revision
    drained = server.complete(model="x", prompt=PROMPT)
    assert (drained.status_code, drained.json()["error"]["code"]) == (503, "adapter_draining")
    assert admin(server, "POST", "/x/promote", json={"revision": revision}).status_code == 200
    assert server.complete(model="x", prompt=PROMPT).status_code == 503
    assert admin(server, "POST", "/x/resume").status_code == 200
    assert says(server, "x") == right["c"]
    assert admin(server, "POST", "/x/pin").status_code == 200 and show(server, "x")["pinned"]
    assert admin(server, "POST", "/new/preload").status_code in (200, 202)
    wait_until(lambda: show(server, "new")["resident"], 10, "it to be preloaded")
