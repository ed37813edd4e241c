"""Text, stop strings and token places of one output together."""

from __future__ import annotations

from collections.abc import Sequence

from tp_engine.messages import TokenLogprobs
from tp_engine.text import OutputText, Tokenizer


def logprobs(ids: Sequence[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(token=i, logprob=-1.0, top_ids=[], top_logprobs=[]) for i in ids]


def test_surplus_tokens_after_a_stop_string_are_not_counted(
    byte_level_tokenizer: Tokenizer,
) -> None:
    ids = byte_level_tokenizer.encode("abSTOPcd")
    output = OutputText(byte_level_tokenizer, stops=["STOP"])
    assert output.push(ids).text == "ab"
    assert (output.stopped_by, output.tokens) == ("STOP", 6)
    assert (output.push(ids).text, output.flush().text, output.tokens) == ("", "", 6)


def test_tokens_of_the_stop_string_have_no_place(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("abSTOPcd")
    output = OutputText(byte_level_tokenizer, stops=["STOP"])
    pieces = [piece for token in ids for piece in output.push([token], logprobs([token])).pieces]
    assert [(piece.logprobs.token, piece.offset) for piece in pieces] == [(ids[0], 0), (ids[1], 1)]


def test_places_index_the_text_in_characters(byte_level_tokenizer: Tokenizer) -> None:
    text = "the \u00e9t\U0001f600 w"
    ids = byte_level_tokenizer.encode(text)
    output = OutputText(byte_level_tokenizer)
    first = output.push(ids, logprobs(ids))
    last = output.flush()
    pieces = first.pieces + last.pieces
    assert [piece.logprobs.token for piece in pieces] == ids
    for piece in pieces:
        shown = byte_level_tokenizer.token_bytes(piece.logprobs.token)
        assert text[piece.offset :].encode().find(shown) in range(4)


def test_stop_strings_wait_for_min_tokens(byte_level_tokenizer: Tokenizer) -> None:
    ids = byte_level_tokenizer.encode("xaxbx")
    output = OutputText(byte_level_tokenizer, stops=["x"], min_tokens=3)
    text = "".join(output.push([token]).text for token in ids)
    assert (text, output.stopped_by, output.tokens) == ("xaxb", "x", 5)


def test_a_pending_match_counts_at_the_end(byte_level_tokenizer: Tokenizer) -> None:
    output = OutputText(byte_level_tokenizer, stops=["abcd", "bc"])
    assert output.push(byte_level_tokenizer.encode("abc")).text == ""
    assert output.stopped_by is None
    assert (output.flush().text, output.stopped_by) == ("a", "bc")
