"""One busy service of two ranks and eight adapters, and the clients that people use."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.conftest import ADAPTERS
from tests.e2e.service import Server, wait_until

KEY = "sk-e2e"
PAGES = 80
MODELS = ("base", *ADAPTERS)
TOKENS = 24
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(
    model: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Few pages and short steps, so that requests wait, are preempted, and adapters are evicted."""
    directory = tmp_path_factory.mktemp("service")
    keys = directory / "keys"
    keys.write_text(f"# of this test\n{KEY}\n")
    options = (
        "--served-model-name=base",
        "--deterministic",
        f"--num-pages={PAGES}",
        "--max-num-seqs=24",
        "--max-num-batched-tokens=64",
        f"--lora-dir={adapters}",
        f"--api-key-file={keys}",
    )
    with Server(directory, model, *options, key=KEY) as server:
        server.wait_ready()
        yield server
        assert server.process.poll() is None
        assert "Traceback" not in server.log and " ERROR " not in server.log, server.log


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60.0
    ) as client:
        yield client


def check_nothing_held(server: Server) -> None:
    """All pages are free, cached, or of adapters, once the engine has had a second to say so."""
    wait_until(lambda: server.open_requests == 0, 20, "no open requests")
    pages = {
        name: server.gauge(f"tp_engine:pages_{name}")
        for name in ("total", "free", "cached", "adapters", "kv")
    }
    assert pages["total"] == PAGES
    assert pages["free"] + pages["cached"] + pages["adapters"] == PAGES
    assert pages["kv"] == 0
    assert server.gauge("tp_engine:integrity_faults") == 0


def question(number: int) -> dict[str, Any]:
    """The fields of one of 18 requests: nine models, greedy and drawn."""
    model = MODELS[number % len(MODELS)]
    drawn = number % 18 >= len(MODELS)
    fields: dict[str, Any] = {
        "model": model,
        "prompt": f"{model} says: " + "the dog " * (number % 7),
    }
    return fields | ({"temperature": 0.9, "seed": number % 18} if drawn else {})


def test_64_streams_equal_their_solo_runs(server: Server) -> None:
    alone = []
    for number in range(18):
        answer = server.complete(**question(number), max_tokens=TOKENS).json()
        alone.append(answer["choices"][0]["text"])
    assert len(set(alone)) > 12

    def ask(number: int) -> str:
        with server.stream(**question(number), max_tokens=TOKENS) as stream:
            stream.read_all()
            assert stream.whole, stream.events[-1]
            return stream.text()

    # The oldest request holds half of the pages and takes more, so that the others must give way.
    oldest = server.stream(prompt=[7] * 560, max_tokens=400, ignore_eos=True)
    with oldest, ThreadPoolExecutor(64) as pool:
        oldest.read(1)
        for number, text in enumerate(pool.map(ask, [n % 18 for n in range(64)])):
            assert text == alone[number % 18], question(number % 18)
    for name in ("steps_with_4_revisions", "preemptions", "adapter_evictions", "chunked_prefills"):
        assert server.gauge(f"tp_engine:{name}_total") > 0, name
    check_nothing_held(server)


def test_clients_that_leave_give_back_all_they_held(server: Server) -> None:
    """24 of 40 streams run, or wait for pages; the others queue; each leaves where it is."""
    with ExitStack() as stack, ThreadPoolExecutor(40) as pool:
        running = stack.enter_context(server.stream(max_tokens=1000))
        running.read(2)
        bodies = [{"model": MODELS[n % 9], "prompt": [n % 50 + 6] * 200} for n in range(40)]
        aborted = server.gauge("tp_engine:aborted_total")

        def ask_and_leave(body: dict[str, Any]) -> None:
            with (
                pytest.raises(httpx.ReadTimeout),
                httpx.Client(base_url=server.url, headers=server.headers, timeout=3.0) as client,
            ):
                client.post("/v1/completions", json=body | {"max_tokens": 900, "ignore_eos": True})

        left = [pool.submit(ask_and_leave, body) for body in bodies]
        wait_until(lambda: server.gauge("vllm:num_requests_waiting") > 0, 20, "a queue")
        for each in left:
            each.result(30)
        running.read(2)
        running.close()
        check_nothing_held(server)
        assert server.gauge("tp_engine:aborted_total") == aborted + 41
    assert server.complete(max_tokens=2).status_code == 200


def test_three_streamed_outputs_equal_the_whole_answer(server: Server) -> None:
    fields = {"model": ADAPTERS[0], "n": 3, "temperature": 0.9, "seed": 5, "max_tokens": 12}
    whole = server.complete(**fields).json()["choices"]
    with server.stream(**fields, stream_options={"include_usage": True}) as stream:
        stream.read_all()
    assert stream.whole
    assert [stream.text(index) for index in range(3)] == [choice["text"] for choice in whole]
    assert len({choice["text"] for choice in whole}) == 3
    ends = [
        (each["index"], each["finish_reason"]) for each in stream.choices if each["finish_reason"]
    ]
    assert sorted(ends) == [(0, "length"), (1, "length"), (2, "length")]
    usage = stream.events[-2]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 36


def test_a_seed_gives_the_same_answer_again_and_no_seed_another(server: Server) -> None:
    fields = {"temperature": 1.0, "max_tokens": 16}

    def text(**more: Any) -> str:
        return str(server.complete(**fields, **more).json()["choices"][0]["text"])

    assert text(seed=3) == text(seed=3)
    assert text(seed=3) != text(seed=4)
    assert len({text() for _ in range(3)}) == 3


def test_only_requests_with_a_key_are_served(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=30.0) as anyone:
        for path in ("/health", "/ready", "/metrics"):
            assert anyone.get(path).status_code == 200
        body = {"model": "base", "prompt": "a", "max_tokens": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
            answer = anyone.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert anyone.get("/v1/models").status_code == 401
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    assert KEY not in server.log


def resident_adapters(server: Server) -> list[str]:
    """From the labels that gateways route by."""
    labels = r'max_lora="8",running_lora_adapters="(.*)",waiting_lora_adapters=".*"'
    found = re.search(f"vllm:lora_requests_info{{{labels}}}", server.http.get("/metrics").text)
    assert found is not None
    return found[1].split(",")


def test_metrics_have_the_names_that_gateways_read(server: Server) -> None:
    server.complete(model=ADAPTERS[1], max_tokens=2)
    wait_until(lambda: ADAPTERS[1] in resident_adapters(server), 5, "the adapter in the arena")
    text = server.http.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f"\nvllm:{name} " in text
    for name in (
        "requests_total",
        "finished_total",
        "generation_tokens_total",
        "pages_total",
        "adapter_loads_total",
        "adapter_evictions_total",
        "integrity_faults",
    ):
        assert f"\ntp_engine:{name} " in text


# --- with the client library that applications use ------------------------------------------


def test_models_are_listed_with_their_base(client: openai.OpenAI, adapters: Path) -> None:
    listed = {each.id: each for each in client.models.list()}
    assert list(listed) == list(MODELS)
    extra = listed[ADAPTERS[3]].model_extra
    assert extra is not None
    assert extra["parent"] == "base"
    assert extra["root"] == str(adapters / ADAPTERS[3])
    assert len(extra["revision"]) == 64
    assert client.models.retrieve(ADAPTERS[3]).id == ADAPTERS[3]


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    for name in ("nobody", "../../etc/passwd", "https://host/adapter", "base:nobody"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model=name, prompt="a", max_tokens=1)
        assert caught.value.code == "model_not_found"
        assert caught.value.param == "model"


def test_a_chat_is_the_same_streamed(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": ADAPTERS[2],
        "messages": [
            {"role": "system", "content": "the dog"},
            {"role": "user", "content": [{"type": "text", "text": "what is the capital?"}]},
        ],
        "temperature": 0,
        "max_completion_tokens": 20,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.chat.completions.create(**fields)
    choice = whole.choices[0]
    chunks = list(
        client.chat.completions.create(
            **fields, stream=True, stream_options={"include_usage": True}
        )
    )
    assert choice.finish_reason == "length"
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [each for chunk in chunks for each in chunk.choices]
    assert "".join(each.delta.content or "" for each in deltas) == choice.message.content
    assert deltas[-1].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert whole.usage is not None and whole.usage.completion_tokens == 20
    assert choice.logprobs is not None and choice.logprobs.content is not None
    streamed = [token for each in deltas if each.logprobs for token in each.logprobs.content or []]
    assert [each.token for each in streamed] == [each.token for each in choice.logprobs.content]
    assert len(streamed) == 20
    for each in choice.logprobs.content:
        assert len(each.top_logprobs) == 2
        assert each.logprob == pytest.approx(each.top_logprobs[0].logprob)  # greedy
        assert each.top_logprobs[0].logprob >= each.top_logprobs[1].logprob


def test_logprobs_of_a_chat_without_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="base",
        messages=[{"role": "user", "content": "the"}],
        max_tokens=3,
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [each.top_logprobs for each in logprobs.content] == [[], [], []]


def test_prompts_times_outputs_come_in_order(client: openai.OpenAI) -> None:
    prompts = ["the dog", "in the sun"]
    fields: dict[str, Any] = {"model": ADAPTERS[4], "max_tokens": 8, "seed": 1, "logprobs": 0}
    fields |= {"extra_body": {"ignore_eos": True}}
    both = client.completions.create(prompt=prompts, n=2, **fields)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    for number, prompt in enumerate(prompts):
        one = client.completions.create(prompt=prompt, n=2, **fields)
        mine = both.choices[2 * number : 2 * number + 2]
        assert [each.text for each in one.choices] == [each.text for each in mine]
    logprobs = both.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 8
    assert logprobs.tokens is not None and "".join(logprobs.tokens) != ""


def test_a_stop_string_across_tokens_is_not_shown(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": ADAPTERS[5], "prompt": "the dog", "temperature": 0}
    fields |= {"max_tokens": 24, "extra_body": {"ignore_eos": True}}
    free = client.completions.create(**fields).choices[0].text
    stop = free[6:9]
    end = free.index(stop)
    stopped = client.completions.create(**fields, stop=stop).choices[0]
    assert (stopped.text, stopped.finish_reason) == (free[:end], "stop")
    chunks = list(client.completions.create(**fields, stop=[stop], stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == free[:end]
    assert chunks[-1].choices[0].finish_reason == "stop"


# --- one bad request hurts one request ---------------------------------------------------------


def bodies_that_are_refused() -> Iterator[tuple[str, bytes, set[int]]]:
    """Path, body and the statuses that are right."""

    def completion(**fields: Any) -> bytes:
        return json.dumps({"model": "base", "prompt": "a", "max_tokens": 2} | fields).encode()

    def chat(**fields: Any) -> bytes:
        messages = [{"role": "user", "content": "a"}]
        return json.dumps({"model": "base", "messages": messages} | fields).encode()

    wrong: list[dict[str, Any]] = [
        *({"prompt": [token]} for token in (-1, 5279552648203111001, 320)),
        {"prompt": []},
        {"prompt": None},
        {"stop_token_ids": [10**9]},
        *({"temperature": value} for value in (float("nan"), float("inf"), -1, "hot")),
        *({"top_p": value} for value in (0, 2, float("nan"))),
        *({"repetition_penalty": value} for value in (0, -1)),
        {"n": 100000},
        {"n": 0},
        {"max_tokens": 10**9},
        {"max_tokens": 0},
        {"max_tokens": 5000},
        {"prompt": [7] * 4097},
        {"logit_bias": {"320": 1}},
        {"logit_bias": {"1": 1e9}},
        {"logprobs": 10**9},
        {"seed": 2**70},
        {"stop": [""]},
        {"stop": ["a"] * 1000},
        {"stream_options": {"include_usage": True}},
        {"guided_regex": "("},
        {"response_format": {"type": "json_schema", "json_schema": "x"}},
    ]
    for fields in wrong:
        yield "/v1/completions", completion(**fields), {400}
    yield "/v1/chat/completions", chat(logprobs=True, top_logprobs=2 * 10**9), {400}
    yield "/v1/chat/completions", chat(messages=[]), {400}
    yield "/v1/chat/completions", chat(messages="hello"), {400}
    yield "/v1/chat/completions", chat(tools=[{"type": "function"}]), {400}
    yield "/v1/completions", b'{"model": "base", "prompt": "\\ud83d"}', {400}
    for body in (b"\xff\xfe", b"", b"[]", b"{", b"[" * 100_000, b'{"model": 1, "prompt": "a"}'):
        yield "/v1/completions", body, {400}
    yield "/v1/completions", completion(prompt="a" * 9 * 2**20), {413}
    yield "/v1/completions", completion(model="nobody"), {404}
    yield "/v1/completions", completion(model="a" * 5000), {400, 404}
    yield "/v1/nope", completion(), {404}


def test_bad_requests_hurt_nobody_else(server: Server) -> None:
    fields: dict[str, Any] = {"model": ADAPTERS[6], "temperature": 0.9, "seed": 8}
    alone = server.complete(**fields, max_tokens=300).json()["choices"][0]["text"]
    with server.stream(**fields, max_tokens=900) as stream:
        stream.read(2)
        for path, body, statuses in bodies_that_are_refused():
            answer = server.http.post(path, content=body)
            assert answer.status_code in statuses, (path, body[:200], answer.text[:500])
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["message"]
        # Still; the engine says so now and then.
        wait_until(lambda: server.gauge("vllm:num_requests_running") == 1, 10, "one that runs")
        wrong_method = server.http.get("/v1/chat/completions")
        assert wrong_method.status_code == 405 and "error" in wrong_method.json()
        known = alone.rstrip("\ufffd")  # its last token may have ended within a character
        while len(stream.text()) < len(known):
            stream.read(20)
        assert stream.text().startswith(known)
    assert server.status("/ready") == 200
    check_nothing_held(server)
