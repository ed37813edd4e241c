"""Adapters that come, change and go while a service of two ranks serves."""

import asyncio
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.service import HOST, Server, wait_until
from tests.helpers.tiny_models import make_peft_adapter, oracle_greedy
from tests.soak.http import Answer, Target, ask
from tp_engine.text import Tokenizer

KEY, ADMIN = "sk-client", "sk-admin"
PROMPT = [50, 60, 70, 80, 90]
TOKENS = 16
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that operators may load from: adapters ``a``, ``b`` and a broken one."""
    path = tmp_path_factory.mktemp("root")
    for seed, name in enumerate("ab"):
        make_peft_adapter(path / name, model, r=3 + seed, seed=seed + 40)
    shutil.copytree(path / "a", path / "broken")
    (path / "broken" / "adapter_model.safetensors").write_bytes(b"\0" * 40)
    return path


@pytest.fixture(scope="module")
def right(model: Path, root: Path) -> dict[str, str]:
    """What each adapter says after `PROMPT`, by the oracle."""
    tokenizer = Tokenizer.load(model)
    return {
        name: tokenizer.decode(
            oracle_greedy(model, PROMPT, TOKENS, None if name == "base" else root / name)
        )
        for name in ("base", "a", "b")
    }


def start(directory: Path, model: Path, root: Path, *options: str) -> Server:
    keys, admin = directory / "keys", directory / "admin"
    keys.write_text(KEY)
    admin.write_text(ADMIN)
    return Server(
        directory,
        model,
        "--served-model-name=base",
        "--deterministic",
        "--num-pages=80",
        f"--api-key-file={keys}",
        f"--admin-key-file={admin}",
        f"--adapter-root={root}",
        *options,
        key=KEY,
    )


@pytest.fixture(scope="module")
def server(model: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("service")
    with start(directory, model, root) as server:
        server.wait_ready()
        yield server
        assert "Traceback" not in server.log, server.log


def call(server: Server, what: str, key: str = ADMIN, **body: Any) -> httpx.Response:
    """A call of the control plane."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(
        f"{server.url}/v1/{what}_lora_adapter", json=body, headers=headers, timeout=60.0
    )


def admin(server: Server, method: str, path: str, **options: Any) -> httpx.Response:
    """A call of the operators' API."""
    headers = {"Authorization": f"Bearer {ADMIN}"}
    return httpx.request(
        method, f"{server.url}/admin/adapters{path}", headers=headers, timeout=60.0, **options
    )


def load(server: Server, name: str, path: Path, **body: Any) -> httpx.Response:
    return call(server, "load", lora_name=name, lora_path=str(path), **body)


def says(server: Server, name: str) -> str:
    """What a model says after `PROMPT`."""
    answer = server.complete(model=name, prompt=PROMPT, max_tokens=TOKENS, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def served(server: Server) -> set[str]:
    return {card["id"] for card in server.http.get("/v1/models").json()["data"]}


def test_an_adapter_comes_and_goes(server: Server, root: Path, right: dict[str, str]) -> None:
    assert load(server, "x", root / "a").json() == {
        "message": "Success: LoRA adapter 'x' added successfully.",
        "lora_name": "x",
        "revision": server.http.get("/v1/models/x").json()["revision"],
        "modules_applied": 14,
        "modules_expected": 14,
    }
    assert served(server) == {"base", "x"}
    assert says(server, "x") == right["a"] != right["base"] == says(server, "base")
    refused = load(server, "x", root / "b")
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "adapter_exists"
    assert call(server, "unload", lora_name="x").status_code == 200
    assert served(server) == {"base"}
    gone = server.complete(model="x", prompt=PROMPT)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    again = call(server, "unload", lora_name="x")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "adapter_not_found")
    wait_until(lambda: server.gauge("tp_engine:pages_adapters") == 0, 10, "no adapter's pages")


def test_a_replaced_adapter_answers_at_once_and_running_requests_keep_theirs(
    server: Server, root: Path, right: dict[str, str]
) -> None:
    load(server, "y", root / "a")
    alone = server.complete(model="y", prompt=PROMPT, max_tokens=300, ignore_eos=True).json()
    fields = {"model": "y", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True}
    with server.stream(**fields) as running:
        running.read(3)
        assert load(server, "y", root / "b", load_inplace=True).status_code == 200
        assert says(server, "y") == right["b"]
        running.read_all()
    assert running.whole and running.text() == alone["choices"][0]["text"]
    assert running.text().startswith(right["a"])
    call(server, "unload", lora_name="y")


def test_a_running_request_outlives_its_adapters_name(
    server: Server, root: Path, right: dict[str, str]
) -> None:
    load(server, "z", root / "b")
    with server.stream(model="z", prompt=PROMPT, max_tokens=300, ignore_eos=True) as running:
        running.read(3)
        assert call(server, "unload", lora_name="z").status_code == 200
        assert load(server, "z", root / "b").status_code == 200  # it is still there: named again
        assert call(server, "unload", lora_name="z").status_code == 200
        running.read_all()
    assert running.whole and running.text().startswith(right["b"])
    wait_until(lambda: server.gauge("tp_engine:pages_adapters") == 0, 10, "no adapter's pages")


def test_an_in_place_reload_hits_no_old_kv(server: Server, model: Path, root: Path) -> None:
    """The same prompt, cached for the old revision, whose keys and values are not the new one's."""
    prompt = [(7 * i) % 250 + 10 for i in range(40)]
    fields = {"model": "k", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
    tokenizer = Tokenizer.load(model)

    def asked(adapter: str, cached: int) -> None:
        answer = server.complete(**fields).json()
        wanted = tokenizer.decode(oracle_greedy(model, prompt, TOKENS, root / adapter))
        assert answer["choices"][0]["text"] == wanted
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert answer["system_fingerprint"] == server.http.get("/v1/models/k").json()["revision"]

    load(server, "k", root / "a")
    asked("a", cached=0)
    asked("a", cached=32)
    load(server, "k", root / "b", load_inplace=True)
    asked("b", cached=0)
    call(server, "unload", lora_name="k")


def test_names_that_look_alike_stay_two_adapters(
    server: Server, root: Path, right: dict[str, str]
) -> None:
    names = {"u/v": "a", "u-v": "b", "u_v": "a"}
    for name, adapter in names.items():
        assert load(server, name, root / adapter).status_code == 200
    assert served(server) == {"base", *names}
    for name, adapter in names.items():
        assert says(server, name) == right[adapter]
    assert admin(server, "DELETE", "/u/v").status_code == 200
    assert served(server) == {"base", "u-v", "u_v"} and says(server, "u-v") == right["b"]
    for name in ("u-v", "u_v"):
        call(server, "unload", lora_name=name)


def test_an_unload_while_sixteen_outputs_run_drains(
    server: Server, root: Path, right: dict[str, str]
) -> None:
    load(server, "n", root / "a")
    fields = {"model": "n", "prompt": PROMPT, "n": 16, "max_tokens": 400, "ignore_eos": True}
    with server.stream(**fields) as leaving, server.stream(**fields | {"n": 1}) as staying:
        leaving.read(20)
        staying.read(1)
        wait_until(lambda: server.open_requests == 17, 10, "17 open requests")
        assert call(server, "unload", lora_name="n").status_code == 200
        leaving.close()
        staying.read_all()
    assert staying.whole and staying.text().startswith(right["a"])
    wait_until(lambda: server.open_requests == 0, 10, "no open requests")
    wait_until(lambda: server.gauge("tp_engine:pages_adapters") == 0, 10, "no adapter's pages")
    assert server.gauge("tp_engine:pages_kv") == 0
    assert 'max_lora="0"' in server.http.get("/metrics").text


def test_of_many_loads_of_one_name_one_succeeds(
    server: Server, root: Path, right: dict[str, str]
) -> None:
    """200 at once, 50 of them of one name."""
    names = ["same"] * 50 + [f"other-{i}" for i in range(150)]
    target = Target(host=HOST, port=server.port, key=ADMIN)

    async def all_at_once(route: str, bodies: list[dict[str, str]]) -> list[Answer]:
        return await asyncio.gather(*(ask(target, "POST", route, body) for body in bodies))

    bodies = [{"lora_name": name, "lora_path": str(root / "a")} for name in names]
    answers = asyncio.run(all_at_once("/v1/load_lora_adapter", bodies))
    codes = [answer.status for answer in answers]
    assert codes[:50].count(200) == 1 and set(codes[:50]) <= {200, 400, 409}
    refused = {answer.code for answer in answers[:50] if answer.status != 200}
    assert refused <= {"adapter_exists", "adapter_loading"}
    assert codes[50:] == [200] * 150
    assert says(server, "same") == says(server, "other-7") == right["a"]
    bodies = [{"lora_name": name} for name in sorted(set(names))]
    gone = asyncio.run(all_at_once("/v1/unload_lora_adapter", bodies))
    assert {answer.status for answer in gone} == {200}
    assert served(server) == {"base"}


@pytest.mark.parametrize(
    ("name", "path", "code"),
    [
        ("bad", "broken", "weights_corrupt"),
        ("bad", "nothing", "path_refused"),
        ("bad", "..", "path_refused"),
        ("base", "a", "name_refused"),
        ("", "a", "name_refused"),
    ],
)
def test_what_cannot_be_loaded_is_refused_and_the_rest_serves(
    name: str, path: str, code: str, server: Server, root: Path, right: dict[str, str]
) -> None:
    answer = load(server, name, root / path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert served(server) == {"base"} and says(server, "base") == right["base"]


@pytest.mark.parametrize("body", [{}, {"lora_name": 1}, {"lora_name": "x", "lora_path": None}])
def test_a_malformed_call_names_the_field(body: dict[str, Any], server: Server) -> None:
    answer = call(server, "load", **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("lora_name", "lora_path")


def test_only_an_operator_may_call(server: Server, root: Path) -> None:
    for key in (KEY, "wrong"):
        answer = call(server, "load", key=key, lora_name="x", lora_path=str(root / "a"))
        assert answer.status_code == 401
    assert httpx.get(f"{server.url}/admin/adapters", headers=server.headers).status_code == 401
    as_operator = {"Authorization": f"Bearer {ADMIN}"}
    assert server.http.get("/v1/models", headers=as_operator).status_code == 401
    assert served(server) == {"base"}


def test_what_was_loaded_is_there_after_all_processes_were_killed(
    model: Path, root: Path, right: dict[str, str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(root, mine)
    store = f"--adapter-store={tmp_path / 'store'}"
    with start(tmp_path, model, mine, store) as server:
        server.wait_ready()
        for name, path in (("x", "a"), ("y", "b"), ("gone", "a")):
            assert load(server, name, mine / path).status_code == 200
        assert load(server, "x", mine / "b", load_inplace=True).status_code == 200
        assert call(server, "unload", lora_name="gone").status_code == 200
        first, second = (admin(server, "GET", "/x").json()["history"][place] for place in (1, 0))
        assert admin(server, "POST", "/x/roll_back").json()["revision"] == first
        assert says(server, "x") == right["a"]
        assert admin(server, "POST", "/x/roll_back").json()["error"]["code"] == "nothing_before"
        promoted = admin(server, "POST", "/x/promote", json={"revision": second})
        assert promoted.json()["revision"] == second
        nobody = admin(server, "POST", "/x/promote", json={"revision": "f" * 64})
        assert (nobody.status_code, nobody.json()["error"]["code"]) == (400, "unknown_revision")
        names = [each["name"] for each in admin(server, "GET", "").json()["adapters"]]
        assert names == ["x", "y"]
        assert admin(server, "GET", "?after=x&limit=1").json()["adapters"][0]["name"] == "y"
        assert admin(server, "GET", "?limit=0").status_code == 400
        assert admin(server, "GET", "/nobody").status_code == 404
        assert load(server, "z/w", mine / "a").status_code == 200
        assert admin(server, "DELETE", "/z/w").status_code == 200
        assert load(server, "zz", mine / "a").status_code == 200
        for process in server.processes().values():
            process.send_signal(signal.SIGKILL)
    shutil.rmtree(mine)
    mine.mkdir()
    with start(tmp_path, model, mine, store) as server:
        server.wait_ready()
        assert served(server) == {"base", "x", "y", "zz"}
        assert says(server, "x") == says(server, "y") == right["b"]
        cold = server.complete(model="zz", prompt=PROMPT, wait_for_adapter=False)
        assert (cold.status_code, cold.json()["error"]["code"]) == (503, "adapter_loading")
        assert cold.headers["retry-after"] == "1"
        wait_until(lambda: admin(server, "GET", "/zz").json()["warm"], 20, "zz on the hosts")
        assert says(server, "zz") == right["a"]
