"""``/v1/completions``."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from server.openai import completions, routes
from server.openai.logprobs import completion_logprobs
from server.openai.shapes import CompletionLogprobs
from tests.server.conftest import Api
from tests.server.fake_engine import CONTEXT, REVISIONS, STOP_TOKEN, VOCAB, FakeEngine
from tests.server.sse import error, events, texts
from tp_engine.text import Tokenizer

pytestmark = pytest.mark.anyio
TRICKY = "caf\u00e9 \u010fakujem \U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 the end"


def say(engine: FakeEngine, tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine.reply = lambda submit: ids
    return ids


async def test_answer_has_the_documented_shape(
    api: Api, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    ids = say(engine, tokenizer, " and on")
    body = (await api.complete(prompt="so", max_tokens=50)).json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert isinstance(body["created"], int) and body["model"] == "base"
    assert body["choices"] == [
        {
            "index": 0,
            "text": " and on",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": len(ids) + 1,
        "total_tokens": len(ids) + 3,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_a_token_that_the_request_named_is_the_reason_of_its_end(
    api: Api, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    say(engine, tokenizer, " and on")
    fields = {"prompt": "so", "max_tokens": 50, "stop_token_ids": [3, STOP_TOKEN]}
    (choice,) = (await api.complete(**fields)).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", STOP_TOKEN)


@pytest.mark.parametrize("model", REVISIONS)
async def test_an_answer_names_the_revision_that_gave_it(api: Api, model: str) -> None:
    revision = REVISIONS[model]
    fields = {"model": model, "n": 3, "max_tokens": 4}
    for call, prompt in ((api.complete, {"prompt": "a"}), (api.chat, {})):
        assert (await call(**fields, **prompt)).json()["system_fingerprint"] == revision
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = events(await call(**fields, **prompt, **options))
        assert {chunk["system_fingerprint"] for chunk in chunks} == {revision}


async def test_all_outputs_of_a_request_reach_the_engine_together(
    api: Api, engine: FakeEngine
) -> None:
    await api.complete(prompt=["a", "b"], n=3)
    assert engine.received == [6]


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
async def test_default_limit_is_16(api: Api, engine: FakeEngine, fields: dict[str, None]) -> None:
    body = (await api.complete(prompt="a", **fields)).json()
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["text"] == "a" * 16
    assert engine.submits[0].params.max_tokens == 16


async def test_default_limit_shrinks_to_the_room_there_is(api: Api, engine: FakeEngine) -> None:
    assert (await api.complete(prompt=[5] * (CONTEXT - 3))).status_code == 200
    assert engine.submits[0].params.max_tokens == 3


@pytest.mark.parametrize("limit", [1, 7, 8, 9, 12, 100])
@pytest.mark.parametrize("step", [1, 3])
async def test_stream_concatenates_to_the_whole_text(
    api: Api, engine: FakeEngine, tokenizer: Tokenizer, limit: int, step: int
) -> None:
    ids = say(engine, tokenizer, TRICKY)
    engine.step = step
    whole = (await api.complete(prompt="a", max_tokens=limit)).json()["choices"][0]
    chunks = events(await api.complete(prompt="a", max_tokens=limit, stream=True))
    assert texts(chunks)[0] == whole["text"] == tokenizer.decode(ids[:limit])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons[-1] == whole["finish_reason"] and set(reasons[:-1]) <= {None}
    assert not any("\ufffd" in chunk["choices"][0]["text"] for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in chunks)


async def test_outputs_are_ordered_by_prompt_then_n(api: Api, engine: FakeEngine) -> None:
    engine.reply = lambda submit: [*submit.prompt, (submit.params.seed or 0) + 40]
    fields = {"prompt": [[1, 2], [3]], "n": 2, "seed": 7, "best_of": 2}
    body = (await api.complete(**fields)).json()
    ids = [engine.submits[i].request_id for i in range(4)]
    assert len(set(ids)) == 4
    assert [submit.prompt for submit in engine.submits] == [[1, 2], [1, 2], [3], [3]]
    assert [submit.params.seed for submit in engine.submits] == [7, 8, 7, 8]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 2 * (3 + 1) + 2 * (2 + 1)
    chunks = events(await api.complete(**fields, stream=True))
    assert texts(chunks) == {choice["index"]: choice["text"] for choice in body["choices"]}


async def test_each_index_of_a_stream_has_one_finish_chunk(api: Api) -> None:
    chunks = events(await api.complete(prompt=["a", "b"], n=3, max_tokens=5, stream=True))
    done = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(done) == list(range(6))
    assert texts(chunks) == {i: ("a" if i < 3 else "b") * 5 for i in range(6)}


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [65, 66], [[65, 66]]])
async def test_all_forms_of_prompts(api: Api, engine: FakeEngine, prompt: object) -> None:
    assert (await api.complete(prompt=prompt)).status_code == 200
    assert len(engine.submits[0].prompt) == 2


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [1, "a"], [[1], "a"], [[1], 2], None, 5, ["a", ""]]
)
async def test_malformed_prompts_are_refused(api: Api, prompt: object) -> None:
    assert error(await api.complete(prompt=prompt), 400)["param"] == "prompt"


@pytest.mark.parametrize("ids", [[-1], [5279552648203111001], [VOCAB], [1, VOCAB, 2], [10**30]])
@pytest.mark.parametrize("nested", [False, True])
async def test_ids_outside_the_vocabulary_are_refused(
    api: Api, ids: list[int], nested: bool
) -> None:
    found = error(await api.complete(prompt=[ids] if nested else ids), 400)
    assert found["param"] == "prompt" and "not allowed" in found["message"]


async def test_stop_string_across_tokens_never_shows(
    api: Api, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    ids = say(engine, tokenizer, "alphabet: ABCDEFGHIJKLMNOP")
    chunks = events(
        await api.complete(
            prompt="a",
            stop="DEFGHIJ",
            max_tokens=90,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert texts(chunks) == {0: "alphabet: ABC"}
    last = chunks[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "DEFGHIJ")
    expected = ids.index(tokenizer.encode("J")[0]) + 1
    assert chunks[-1]["usage"]["completion_tokens"] == expected


async def test_stop_string_ends_the_engine_request_with_success(
    api: Api, engine: FakeEngine
) -> None:
    engine.delay = 0.01
    body = (await api.complete(prompt="a", stop=["zz", "aaa"], max_tokens=500)).json()
    assert body["choices"][0]["text"] == ""
    assert body["usage"]["completion_tokens"] == 3
    await engine.settled(aborts=1)
    assert engine.aborts[0].finished
    assert engine.aborts[0].request_id == engine.submits[0].request_id


async def test_surplus_tokens_behind_a_stop_string_are_dropped(
    api: Api, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    say(engine, tokenizer, "one.two.three")
    engine.step = 100
    body = (await api.complete(prompt="a", stop=".", max_tokens=100, logprobs=0)).json()
    assert body["choices"][0]["text"] == "one"
    assert body["choices"][0]["logprobs"]["tokens"] == ["o", "n", "e"]
    assert body["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("include", [True, False, None])
async def test_usage_in_streams(api: Api, include: bool | None) -> None:
    options = {} if include is None else {"stream_options": {"include_usage": include}}
    chunks = events(await api.complete(prompt="ab", max_tokens=3, stream=True, **options))
    if include:
        *rest, last = chunks
        assert last["choices"] == [] and last["usage"]["total_tokens"] == 5
        assert rest and all(chunk["usage"] is None for chunk in rest)
    else:
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_usage_goes_along_with_every_chunk_when_asked_for(api: Api) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    fields = {"n": 2, "max_tokens": 3, "stream": True}
    for call, prompt in ((api.complete, {"prompt": ["ab", "c"]}), (api.chat, {})):
        chunks = events(await call(stream_options=options, **fields, **prompt))
        usages = [chunk["usage"] for chunk in chunks]
        assert len({usage["prompt_tokens"] for usage in usages}) == 1
        assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in usages)
        counts = [usage["completion_tokens"] for usage in usages]
        assert counts == sorted(counts) and counts[0] > 0 and usages[-1] == usages[-2]
        if call == api.complete:  # where each token is a character
            lengths = [sum(map(len, texts(chunks[:end]).values())) for end in range(1, len(chunks))]
            assert counts[:-1] == lengths
    alone = {"continuous_usage_stats": True}
    response = await api.complete(prompt="a", max_tokens=3, stream=True, stream_options=alone)
    assert all("usage" not in chunk for chunk in events(response))


async def test_logprobs_have_the_completions_shape(
    api: Api, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    text = "the \u00e9t\U0001f600"
    ids = say(engine, tokenizer, text)
    choice = (await api.complete(prompt="a", max_tokens=60, logprobs=2)).json()["choices"][0]
    found = choice["logprobs"]
    assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(column) for column in found.values()} == {len(ids)}
    assert found["token_logprobs"] == [-0.5] * len(ids)
    assert all(len(top) == 2 and set(top.values()) == {-0.5, -1.5} for top in found["top_logprobs"])
    assert found["text_offset"] == sorted(found["text_offset"])
    places = zip(found["tokens"], found["text_offset"], strict=True)
    whole = [(token, offset) for token, offset in places if "bytes:" not in token]
    assert len(whole) > 2 and all(text[o:].startswith(t) for t, o in whole)
    assert "bytes:\\xc3" in found["tokens"]


async def test_reports_are_laid_out_beside_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def logprobs(*arguments: Any) -> CompletionLogprobs:
        threads.append(threading.current_thread())
        return completion_logprobs(*arguments)

    monkeypatch.setattr(completions, "completion_logprobs", logprobs)
    answer = await api.complete(prompt="a", max_tokens=2, n=2, logprobs=1)
    assert [len(choice["logprobs"]["tokens"]) for choice in answer.json()["choices"]] == [2, 2]
    assert len(threads) == 2 and threading.main_thread() not in threads


async def test_long_reports_must_be_streamed(
    api: Api, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_REPORTS", 99)
    fields = {"prompt": "a", "max_tokens": 25, "logprobs": 1, "n": 2}
    found = error(await api.complete(**fields), 400)
    assert found["param"] == "logprobs" and "at most 99 log-probabilities" in found["message"]
    assert len(events(await api.complete(**fields, stream=True))) > 1
    assert (await api.complete(**fields | {"max_tokens": 24})).status_code == 200
    await engine.settled(aborts=0)


async def test_zero_logprobs_report_the_sampled_token_only(api: Api) -> None:
    body = (await api.complete(prompt="a", max_tokens=2, logprobs=0)).json()
    found = body["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [{"a": -0.5}, {"a": -0.5}]


async def test_streamed_logprobs_equal_the_whole(
    api: Api, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    say(engine, tokenizer, TRICKY)
    fields = {"prompt": "a", "max_tokens": 60, "logprobs": 1, "stop": "end"}
    whole = (await api.complete(**fields)).json()["choices"][0]["logprobs"]
    chunks = events(await api.complete(**fields, stream=True))
    for column, values in whole.items():
        streamed = [v for c in chunks for v in c["choices"][0]["logprobs"][column]]
        assert streamed == values


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_precedes_the_output(api: Api, tokenizer: Tokenizer, stream: bool) -> None:
    ids = tokenizer.encode("b\u00e9")
    for prompt, shown in ((["ab", "cd"], ["ab", "cd"]), (ids, ["b\u00e9"])):
        response = await api.complete(prompt=prompt, echo=True, n=2, max_tokens=2, stream=stream)
        got = texts(events(response)) if stream else texts([response.json()])
        assert len(got) == 2 * len(shown)
        assert all(
            text.startswith(shown[i // 2]) and text != shown[i // 2] for i, text in got.items()
        )


async def test_over_long_requests_name_both_lengths(api: Api) -> None:
    found = error(await api.complete(prompt=[5] * 500, max_tokens=13), 400)
    assert "500" in found["message"] and "13" in found["message"] and "512" in found["message"]
    assert (found["code"], found["param"]) == ("context_length_exceeded", "max_tokens")
    assert (await api.complete(prompt=[5] * 500, max_tokens=12)).status_code == 200
    found = error(await api.complete(prompt=[5] * CONTEXT), 400)
    assert found["code"] == "context_length_exceeded"


async def test_all_sampling_fields_reach_the_engine(api: Api, engine: FakeEngine) -> None:
    fields = {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "seed": -3,
        "presence_penalty": 1.5,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.25,
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 9,
    }
    response = await api.complete(
        prompt="ab",
        **fields,
        logit_bias={"5": -100, "7": 3},
        stop=["x", "yy"],
        stop_token_ids=[3, 4],
        logprobs=64,
        cache_salt="tenant",
        user="me",
        unknown_field=1,
    )
    assert response.status_code == 200, response.text
    (submit,) = engine.submits
    assert {name: getattr(submit.params, name) for name in fields} == fields
    assert submit.params.logit_bias == {5: -100, 7: 3}
    assert submit.params.stop == ("x", "yy") and submit.params.stop_token_ids == (3, 4)
    assert (submit.params.logprobs, submit.salt) == (64, "tenant")
    assert submit.wait_for_adapter


@pytest.mark.parametrize("asked", [True, False, None])
async def test_a_request_says_whether_it_waits_for_a_cold_adapter(
    asked: bool | None, api: Api, engine: FakeEngine
) -> None:
    response = await api.complete(prompt="ab", wait_for_adapter=asked)
    assert response.status_code == 200, response.text
    assert engine.submits[0].wait_for_adapter == (asked is not False)


async def test_null_means_default(api: Api, engine: FakeEngine) -> None:
    names = (
        "n",
        "best_of",
        "stream",
        "stream_options",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
        "echo",
        "logprobs",
        "suffix",
        "user",
        "skip_special_tokens",
    )
    assert (await api.complete(prompt="a", **dict.fromkeys(names))).status_code == 200
    assert engine.submits[0].params.temperature == 1.0


async def test_special_tokens_can_be_shown(api: Api, engine: FakeEngine) -> None:
    engine.reply = lambda submit: [66, 265, 66]
    hidden = (await api.complete(prompt="a")).json()["choices"][0]["text"]
    shown = (await api.complete(prompt="a", skip_special_tokens=False)).json()["choices"][0]["text"]
    assert shown == hidden[0] + "<|user|>" + hidden[1]
