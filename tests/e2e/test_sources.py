"""Adapters from elsewhere, into a service of two ranks: S3, HTTP, uploads; restarts in between."""

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.service import Server, wait_until
from tests.helpers.tiny_models import make_peft_adapter, oracle_greedy
from tests.sources.bucket import empty_bucket
from tests.sources.web import CONFIG, WEIGHTS, Web, web_server
from tp_engine.text import Tokenizer

ADMIN = "sk-admin"
PROMPT, TOKENS = [50, 60, 70, 80, 90], 12
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_peft_adapter(tmp_path_factory.mktemp("adapter") / "a", model, r=4, seed=70)


@pytest.fixture(scope="module")
def right(model: Path, adapter: Path) -> str:
    """What the adapter says after `PROMPT`, by the oracle."""
    return Tokenizer.load(model).decode(oracle_greedy(model, PROMPT, TOKENS, adapter))


@pytest.fixture(scope="module")
def web(adapter: Path) -> Iterator[Web]:
    with web_server() as web:
        for name in (CONFIG, WEIGHTS):
            web.files[f"team/a/{name}"] = (adapter / name).read_bytes()
        yield web


@pytest.fixture(scope="module")
def s3(adapter: Path) -> Iterator[None]:
    """A bucket with the adapter in it; the environment leads to it."""
    with empty_bucket() as files:
        for name in (CONFIG, WEIGHTS):
            files.put(str(adapter / name), f"bucket/team/a/{name}")
        yield


def start(directory: Path, model: Path, web: Web) -> Server:
    (directory / "admin").write_text(ADMIN)
    return Server(
        directory,
        model,
        "--served-model-name=base",
        "--deterministic",
        "--num-pages=80",
        f"--admin-key-file={directory / 'admin'}",
        f"--adapter-store={directory / 'store'}",
        "--adapter-source=s3://bucket/team",
        f"--adapter-source={web.url}/team",
    )


def admin(server: Server, method: str, path: str, **options: Any) -> Any:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    url = f"{server.url}/admin{path}"
    return httpx.request(method, url, headers=headers, timeout=60.0, **options).json()


def ended(server: Server, begun: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while True:
        seen: dict[str, Any] = admin(server, "GET", f"/operations/{begun['id']}")
        if seen["state"] not in ("fetching", "verifying"):
            return seen
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)


def says(server: Server, name: str) -> str:
    answer = server.complete(model=name, prompt=PROMPT, max_tokens=TOKENS)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_every_source_serves_and_a_kill_within_a_fetch_loses_nothing(
    model: Path, adapter: Path, right: str, web: Web, s3: None, tmp_path: Path
) -> None:
    weights = len(web.files[f"team/a/{WEIGHTS}"])
    with start(tmp_path, model, web) as server:
        server.wait_ready()
        for name, source in (("s3", "s3://bucket/team/a"), ("web", f"{web.url}/team/a")):
            begun = admin(server, "POST", "/adapters", json={"name": name, "source": source})
            done = ended(server, begun)
            assert done["state"] == "ready", done
            assert done["bytes_done"] == done["bytes_total"] > weights
            assert admin(server, "GET", f"/adapters/{name}")["source"] == source
        files = {each: (each, (adapter / each).read_bytes()) for each in (CONFIG, WEIGHTS)}
        begun = admin(server, "POST", "/adapters/sent/upload", files=files)
        assert ended(server, begun)["state"] == "ready"
        assert says(server, "s3") == says(server, "web") == says(server, "sent") == right
        assert says(server, "base") != right

        web.before_body = lambda path: web.gate.clear() if path.endswith(CONFIG) else None
        body = {"name": "late", "source": f"{web.url}/team/a"}
        begun = admin(server, "POST", "/adapters", json=body)
        half = len(web.files[f"team/a/{CONFIG}"]) + weights // 2
        wait_until(
            lambda: admin(server, "GET", f"/operations/{begun['id']}")["bytes_done"] >= half,
            *(20, "half of the weights"),
        )
        for process in server.processes().values():
            process.send_signal(signal.SIGKILL)
    web.before_body = None
    web.gate.set()
    with start(tmp_path, model, web) as server:
        server.wait_ready()
        names = [each["name"] for each in admin(server, "GET", "/adapters")["adapters"]]
        assert names == ["s3", "sent", "web"]
        assert admin(server, "GET", "/operations") == {"operations": []}
        assert ended(server, admin(server, "POST", "/adapters", json=body))["state"] == "ready"
        assert says(server, "late") == right
        assert admin(server, "GET", "/adapters/s3")["source"] == "s3://bucket/team/a"
        left = [*(tmp_path / "store" / "fetching").rglob("*")]
        assert all(path.parent.name == "fetching" for path in left), left
        web.gate.clear()
        begun = admin(server, "POST", "/adapters", json=body | {"name": "never"})
        wait_until(lambda: web.asked[-1][0] == "GET", 20, "a fetch that hangs")
        since = time.monotonic()
        server.signal(0, signal.SIGTERM)
        server.wait_ended(60)
        assert time.monotonic() - since < 20, "the fetch held the service up"
        assert "Traceback" not in server.log, server.log
    web.gate.set()
    shutil.rmtree(tmp_path / "store")
