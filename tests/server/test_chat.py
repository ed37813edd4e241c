"""``/v1/chat/completions``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from server import EngineClient, ServerConfig, create_app
from tests.server.conftest import Api, in_process
from tests.server.fake_engine import CONTEXT, FakeEngine
from tests.server.sse import error, events, texts
from tests.text.tiny_tokenizers import byte_level
from tp_engine.text import Tokenizer

pytestmark = pytest.mark.anyio
HELLO = {"role": "user", "content": "hi"}


def say(engine: FakeEngine, tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine.reply = lambda submit: ids
    return ids


async def test_answer_has_the_documented_shape(
    api: Api, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    ids = say(engine, tokenizer, "well, hello")
    body = (await api.chat()).json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "well, hello"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    prompt = tokenizer.encode("<|user|>hi<|end|><|assistant|>")
    assert engine.submits[0].prompt == prompt
    assert body["usage"]["prompt_tokens"] == len(prompt)
    assert body["usage"]["completion_tokens"] == len(ids) + 1


async def test_stream_opens_each_index_with_the_role(
    api: Api, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    say(engine, tokenizer, "\u00e9\U0001f600 there")
    chunks = events(await api.chat(n=3, stream=True))
    assert texts(chunks) == dict.fromkeys(range(3), "\u00e9\U0001f600 there")
    for index in range(3):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
        assert choices[-1]["finish_reason"] == "stop"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6, 30])
async def test_stream_concatenates_to_the_whole_text(
    api: Api, engine: FakeEngine, tokenizer: Tokenizer, limit: int
) -> None:
    say(engine, tokenizer, "\u00e9\U0001f600\U0001f600 there")
    whole = (await api.chat(max_tokens=limit)).json()["choices"][0]["message"]["content"]
    assert texts(events(await api.chat(max_tokens=limit, stream=True)))[0] == whole


async def test_default_limit_is_the_rest_of_the_context(api: Api, engine: FakeEngine) -> None:
    for fields in ({}, {"max_tokens": None}, {"max_completion_tokens": None}):
        engine.submits.clear()
        assert (await api.chat(**fields)).status_code == 200
        (submit,) = engine.submits
        assert submit.params.max_tokens == CONTEXT - len(submit.prompt)


async def test_the_newer_limit_wins(api: Api, engine: FakeEngine) -> None:
    await api.chat(max_tokens=5, max_completion_tokens=7)
    assert engine.submits[0].params.max_tokens == 7


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("value", [0, -1, 10**9, 10**30, "5", 1.5, True])
async def test_impossible_limits_are_refused_by_name(api: Api, name: str, value: object) -> None:
    assert error(await api.chat(**{name: value}), 400)["param"] == name


async def test_over_long_requests_name_both_lengths(api: Api, engine: FakeEngine) -> None:
    found = error(await api.chat(max_tokens=CONTEXT), 400)
    assert str(CONTEXT) in found["message"] and " 5 " in found["message"]
    found = error(await api.chat(messages=[{"role": "user", "content": "x" * CONTEXT}]), 400)
    assert found["code"] == "context_length_exceeded"
    assert not engine.submits


async def test_logprobs_have_the_chat_shape(
    api: Api, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    ids = say(engine, tokenizer, "the \u00e9")
    body = (await api.chat(logprobs=True, top_logprobs=2)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == len(ids)
    for token in content:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        assert [set(top) for top in token["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
        assert token["top_logprobs"][0]["bytes"] == token["bytes"]
    assert bytes(b for token in content for b in token["bytes"]) == "the \u00e9".encode()
    assert content[-1]["token"] == "bytes:\\xa9"


async def test_logprobs_alone_have_no_alternatives(api: Api, engine: FakeEngine) -> None:
    body = (await api.chat(logprobs=True, max_tokens=2)).json()
    assert [t["top_logprobs"] for t in body["choices"][0]["logprobs"]["content"]] == [[], []]
    assert engine.submits[0].params.logprobs == 0


async def test_streamed_logprobs_equal_the_whole(
    api: Api, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    say(engine, tokenizer, "caf\u00e9 \U0001f600 end")
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "stop": "nd"}
    whole = (await api.chat(**fields)).json()["choices"][0]["logprobs"]["content"]
    chunks = events(await api.chat(**fields, stream=True))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [t for c in choices if c["logprobs"] for t in c["logprobs"]["content"]] == whole


async def test_template_refusal_is_a_400_with_its_message(api: Api) -> None:
    for role in ("system", "developer"):
        found = error(await api.chat(messages=[{"role": role, "content": "x"}, HELLO]), 400)
        assert "System role not supported" in found["message"]
        assert found["param"] == "messages"


async def test_missing_template_is_a_400(client: EngineClient, tmp_path: Path) -> None:
    bare = Tokenizer.load(byte_level(tmp_path / "bare", template=None))
    async with in_process(create_app(client, bare, ServerConfig())) as http:
        found = error(await Api(http).chat(), 400)
    assert "no chat template" in found["message"]


async def test_content_may_come_in_text_parts(
    api: Api, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await api.chat(messages=[{"role": "user", "content": parts}])
    expected = tokenizer.encode("<|user|>a\nb<|end|><|assistant|>")
    assert engine.submits[0].prompt == expected


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        None,
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": 5, "content": "x"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "tool", "content": "x", "tool_call_id": "y"}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}],
    ],
)
async def test_malformed_messages_are_refused(api: Api, messages: object) -> None:
    assert error(await api.chat(messages=messages), 400)["param"] == "messages"


async def test_a_text_part_that_has_no_text_is_refused_for_that(api: Api) -> None:
    messages = [HELLO, {"role": "user", "content": [{"type": "text", "value": "x"}]}]
    message = error(await api.chat(messages=messages), 400)["message"]
    assert message == "messages[1].content: a part of type 'text' has no text"


async def test_final_message_can_be_continued(
    api: Api, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    turns = [HELLO, {"role": "assistant", "content": "we"}]
    assert (await api.chat(messages=turns, continue_final_message=True)).status_code == 200
    assert tokenizer.decode(engine.submits[0].prompt).endswith("we")
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert error(await api.chat(messages=turns, **both), 400)["param"] == "continue_final_message"


async def test_template_arguments_cannot_set_library_options(api: Api) -> None:
    assert (await api.chat(chat_template_kwargs={"thinking": True})).status_code == 200
    options = list(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)[1:-1]
    assert {"conversation", "tokenize", "chat_template"} < set(options)
    for name in [*options, "messages"]:
        found = error(await api.chat(chat_template_kwargs={name: True}), 400)
        assert found["message"] == f"chat_template_kwargs may not set {name}"
        assert found["param"] == "chat_template_kwargs"
