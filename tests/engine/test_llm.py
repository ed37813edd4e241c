"""Offline use on a rank that only follows."""

from types import SimpleNamespace
from typing import Any

from tp_engine import LLM


def test_a_rank_that_follows_needs_no_tokenizer() -> None:
    followed: list[object] = []
    llm = object.__new__(LLM)
    llm.engine = None
    rank: Any = SimpleNamespace(worker=SimpleNamespace(follow=followed.append))
    llm.rank = rank
    assert llm.generate(["Hello"]) is None
    assert llm.chat([{"role": "user", "content": "Hello"}]) is None
    assert len(followed) == 2
