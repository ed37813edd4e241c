"""Stop strings: leftmost in the whole text, however it arrives."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_engine.text import StopMatcher

letters = st.text("ab", max_size=24)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(stops)
    parts = []
    for piece in pieces:
        parts.append(matcher.push(piece))
        if matcher.matched is not None:
            break
    else:
        parts.append(matcher.flush())
    return "".join(parts), matcher.matched, parts


def test_a_stop_string_across_pieces_is_never_emitted() -> None:
    text, matched, parts = run(["DEFGHIJ"], ["ABC", "D", "EF", "GHI", "JKL", "M"])
    assert (text, matched) == ("ABC", "DEFGHIJ")
    assert not any(letter in part for part in parts for letter in "DEFGHIJ")


def test_held_text_is_released_when_the_match_fails() -> None:
    matcher = StopMatcher(["<end>"])
    assert [matcher.push(piece) for piece in ("a<", "en", "z", "b")] == ["a", "", "<enz", "b"]
    assert matcher.flush() == ""


def test_only_a_possible_prefix_is_held() -> None:
    matcher = StopMatcher(["xyz", "qq"])
    assert matcher.push("hello wor q x") == "hello wor q "
    assert matcher.push(" ") == "x "


def test_text_after_the_match_is_dropped() -> None:
    matcher = StopMatcher(["\n"])
    assert matcher.push("one\ntwo") == "one"
    assert (matcher.push("three"), matcher.flush(), matcher.matched) == ("", "", "\n")


@pytest.mark.parametrize("stops", [["abcd", "bc"], ["bc", "abcd"]])
def test_an_earlier_longer_match_wins(stops: list[str]) -> None:
    assert run(stops, ["x", "ab", "c", "d"])[:2] == ("x", "abcd")
    assert run(stops, ["x", "ab", "c", "e"])[:2] == ("xa", "bc")
    assert run(stops, ["x", "ab", "c"])[:2] == ("xa", "bc")


def test_of_two_at_one_place_the_shorter_is_the_reason_however_the_text_comes() -> None:
    for stops in (["ab", "abc"], ["abc", "ab"]):
        for pieces in (["x", "abc"], ["xa", "b", "c"]):
            assert run(stops, pieces)[:2] == ("x", "ab")


def test_text_that_one_stop_string_holds_is_not_searched_for_the_others() -> None:
    others = ["a" + letter * 1000 for letter in "bcdefghijklmnop"]
    matcher = StopMatcher([*others, "a" * 1000 + "q"])
    begun = time.process_time()
    assert sum(len(matcher.push("a")) for _ in range(4000)) == 3000
    assert time.process_time() - begun < 2, "one search of each takes 10 s in all"


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=3),
    pieces=st.lists(letters, max_size=12),
)
def test_pieces_make_no_difference(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    found = [whole.find(stop) for stop in stops if stop in whole]
    text, matched, _ = run(stops, pieces)
    assert text == whole[: min(found, default=len(whole))]
    assert (matched is None) == (not found)


@given(stop=st.text("ab", min_size=1, max_size=6), pieces=st.lists(letters, max_size=12))
def test_no_more_is_held_than_a_prefix_of_the_stop_string(stop: str, pieces: list[str]) -> None:
    matcher = StopMatcher([stop])
    seen = out = ""
    for piece in pieces:
        seen += piece
        out += matcher.push(piece)
        if matcher.matched is not None:
            return
        held = seen[len(out) :]
        assert stop.startswith(held) and len(held) < len(stop)
