"""The tokenizer wrapper."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tp_engine.text
from tests.text.tiny_tokenizers import byte_level
from tp_engine.text import ChatTemplateError, Tokenizer, TokenizerError
from tp_engine.text.token_bytes import printable_token


def test_exported_names() -> None:
    assert set(tp_engine.text.__all__) == {
        "ChatTemplateError",
        "Detokenizer",
        "OutputText",
        "Piece",
        "StopMatcher",
        "TextDelta",
        "Tokenizer",
        "TokenizerError",
    }


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, tp_engine.text; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_missing_directory_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no-such"):
        Tokenizer.load(tmp_path / "no-such")
    with pytest.raises(TokenizerError, match="cannot load the tokenizer"):
        Tokenizer.load(tmp_path)


def test_corrupt_files_are_refused(tmp_path: Path) -> None:
    directory = byte_level(tmp_path / "model")
    (directory / "tokenizer.json").write_text("{", "utf-8")
    with pytest.raises(TokenizerError, match="model"):
        Tokenizer.load(directory)


def test_saved_truncation_does_not_cut_prompts(tmp_path: Path) -> None:
    directory = byte_level(tmp_path / "model")
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    file.write_text(json.dumps(content), "utf-8")
    assert len(Tokenizer.load(directory).encode("abcdef")) == 6


def test_chat_template_lays_out_turns(byte_level_tokenizer: Tokenizer) -> None:
    turns = [{"role": "user", "content": "hi"}]
    ids = byte_level_tokenizer.encode_chat(turns)
    shown = byte_level_tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == "<|user|>hi<|end|><|assistant|>"
    closed = byte_level_tokenizer.encode_chat(turns, add_generation_prompt=False)
    assert ids[:-1] == closed


def test_continued_message_stays_open(byte_level_tokenizer: Tokenizer) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    ids = byte_level_tokenizer.encode_chat(
        turns, add_generation_prompt=False, continue_final_message=True
    )
    assert byte_level_tokenizer.decode(ids, skip_special_tokens=False).endswith("well")


def test_template_refusal_carries_its_message(byte_level_tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        byte_level_tokenizer.encode_chat([{"role": "system", "content": "be"}])


def test_missing_template_is_an_error(fallback_tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        fallback_tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_template_arguments_cannot_reach_the_library(byte_level_tokenizer: Tokenizer) -> None:
    turns = [{"role": "user", "content": "hi"}]
    with pytest.raises(ChatTemplateError, match="may not set tokenize"):
        byte_level_tokenizer.encode_chat(turns, template_arguments={"tokenize": True})


def test_a_given_template_replaces_the_directory_s(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path / "m"), chat_template="{{ mode }}")
    ids = tokenizer.encode_chat(
        [{"role": "user", "content": "hi"}], template_arguments={"mode": "x"}
    )
    assert tokenizer.decode(ids) == "x"


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    parts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]))
        | st.sampled_from(
            ["<|end|>", "<|im_end|>", "</s>", "  ", " the", "\u1112\u1161", "e\u0301"]
        )
    ),
    special=st.booleans(),
)
def test_ids_are_those_of_the_library(
    tokenizer: Tokenizer, parts: list[str], special: bool
) -> None:
    text = "".join(parts)
    expected = tokenizer._inner(text, add_special_tokens=special)["input_ids"]
    assert tokenizer.encode(text, add_special_tokens=special) == expected


def test_no_token_stands_for_more_than_the_longest(tokenizer: Tokenizer) -> None:
    lengths = [
        len(tokenizer.decode([token], skip_special_tokens=False)) for token in range(len(tokenizer))
    ]
    assert max(lengths) <= tokenizer.longest <= 2 * max(lengths) + 6


def test_token_bytes_join_to_the_text(
    byte_level_tokenizer: Tokenizer, fallback_tokenizer: Tokenizer
) -> None:
    text = "the \u00e9 \U0001f600 w <|end|>"
    for tokenizer, prefix in ((byte_level_tokenizer, b""), (fallback_tokenizer, b" ")):
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(token) for token in ids)
        assert joined == prefix + text.encode()
        assert tokenizer.token_bytes(10**6) == b""


def test_partial_characters_are_printed_as_bytes() -> None:
    assert printable_token(b"\xc4") == "bytes:\\xc4"
    assert printable_token("\u010f".encode()) == "\u010f"


def test_threads_may_share_a_tokenizer(byte_level_tokenizer: Tokenizer) -> None:
    texts = ["the " * size for size in range(1, 65)]
    expected = [byte_level_tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(byte_level_tokenizer.encode, texts)) == expected
