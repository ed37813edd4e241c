"""Detokenisation: nothing is taken back, nothing is lost, half characters never show."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tp_engine.text import Detokenizer, Tokenizer

SAMPLES = [
    "the king of the north",
    "\u010fakujem \u2014 na\u00efve",
    "\U0001f600\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 there",
    "\u6f22\u5b57 and \u2260 signs",
    "   spaces   in  runs ",
    "",
]
relaxed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def stream(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    parts = [detokenizer.push(token) for token in ids] + [detokenizer.flush()]
    assert detokenizer.length == len("".join(parts))
    return parts


@pytest.mark.parametrize("text", SAMPLES)
def test_stream_concatenates_to_the_text_without_half_characters(
    tokenizer: Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = stream(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in part for part in parts)


@relaxed
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    parts = stream(tokenizer, ids)
    decoded = tokenizer.decode(ids)
    assert "".join(parts) == decoded
    # The demo's vocabulary lacks a few bytes that only unassigned characters use.
    assert "\ufffd" in decoded or not any("\ufffd" in part for part in parts)


@relaxed
@given(data=st.data())
def test_any_byte_level_ids_concatenate_to_their_decoding(
    byte_level_tokenizer: Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, len(byte_level_tokenizer) + 3), max_size=80))
    assert "".join(stream(byte_level_tokenizer, ids)) == byte_level_tokenizer.decode(ids)


def test_endless_invalid_bytes_come_out_before_the_end(byte_level_tokenizer: Tokenizer) -> None:
    invalid = byte_level_tokenizer.encode("\u00e9", add_special_tokens=False)[1:] * 500
    parts = stream(byte_level_tokenizer, invalid)
    assert "".join(parts) == "\ufffd" * 500
    assert len(parts[-1]) <= 8


def test_a_cut_character_is_flushed_as_replacement(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok \U0001f600", add_special_tokens=False)[:-1]
    parts = stream(tokenizer, ids)
    assert "\ufffd" not in "".join(parts[:-1])
    assert "\ufffd" in parts[-1]


def test_special_tokens_are_skipped_or_shown(fallback_tokenizer: Tokenizer) -> None:
    end = fallback_tokenizer.encode("<|end|>", add_special_tokens=False)[-1]
    assert end in fallback_tokenizer.special_ids
    first, second = (fallback_tokenizer.encode(word) for word in ("he", "we"))
    assert "".join(stream(fallback_tokenizer, [*first, end, *second])) == "he we"
    shown = "".join(stream(fallback_tokenizer, [*first, end, *second], skip=False))
    assert shown == "he<|end|> we"


def test_a_continuing_text_keeps_its_leading_space(tokenizer: Tokenizer) -> None:
    before, after = "he", " we went \U0001f600"
    ids = tokenizer.encode(before + after, add_special_tokens=False)
    rest = ids[len(tokenizer.encode(before, add_special_tokens=False)) :]
    detokenizer = Detokenizer(tokenizer, continues=True)
    parts = [detokenizer.push(token) for token in rest] + [detokenizer.flush()]
    assert "".join(parts) == after
    assert detokenizer.length == len(after)


def test_work_per_token_does_not_grow(
    byte_level_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = 0
    decode = byte_level_tokenizer.decode

    def measured(ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids, skip_special_tokens=skip_special_tokens)

    text = "the \u00e9 \U0001f600 \u6f22 " * 100
    ids = byte_level_tokenizer.encode(text)
    invalid = byte_level_tokenizer.encode("\u00e9")[1:] * 100
    monkeypatch.setattr(byte_level_tokenizer, "decode", measured)
    stream(byte_level_tokenizer, [*ids, *invalid, *ids])
    assert longest <= 40
