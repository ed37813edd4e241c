from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_engine.adapters import AdapterError
from tp_engine.adapters.names import MAX_NAME_LENGTH, check_name

BASES = ("llama", "org/llama-8b", "org/llama-8b:tuned")


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "a/b",
        "a-b",
        "a.b_c",
        "Ünïcödé",
        "適応",
        "می\N{ZERO WIDTH NON-JOINER}خواهم",
        "👩‍🔬",
        "two words",
        "x:y",
        "user@example.com",
        "v@1234567",
        "v@DEADBEEF",
        "llamas:x",
        "x" * MAX_NAME_LENGTH,
    ],
)
def test_good_names_stay_as_they_are(name: str) -> None:
    assert check_name(name, BASES) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "\t",
        "\N{NO-BREAK SPACE}",
        " a",
        "a ",
        "a\n",
        "a\x00b",
        "a\x1b[0m",
        "a\x85b",
        "a\N{ZERO WIDTH SPACE}b",
        "a\N{RIGHT-TO-LEFT OVERRIDE}b",
        "a\N{LINE SEPARATOR}b",
        "\N{ZERO WIDTH JOINER}",
        "\N{COMBINING ACUTE ACCENT}",
        "\ud800",
        "x" * (MAX_NAME_LENGTH + 1),
        "x" * 5000,
        "\u0958" * MAX_NAME_LENGTH,  # two characters each in NFC
    ],
    ids=ascii,
)
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(AdapterError, match="adapter name") as caught:
        check_name(name, BASES)
    assert caught.value.code == "name_refused"
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "name",
    [
        *BASES,
        "llama:x",
        "llama:",
        "org/llama-8b:x",
        "tuned",  # org/llama-8b:tuned is a base name
        "x@12345678",
        "x@" + "a" * 64,
        "@deadbeef",
        "a@b@deadbeef",
    ],
)
def test_names_with_a_second_reading_are_refused(name: str) -> None:
    with pytest.raises(AdapterError) as caught:
        check_name(name, BASES)
    assert caught.value.code == "name_refused"


def test_equal_looking_spellings_are_one_name() -> None:
    assert check_name("cafe\N{COMBINING ACUTE ACCENT}") == check_name("caf\u00e9") == "caf\u00e9"


@given(st.text(max_size=300))
def test_a_name_is_kept_in_a_stable_form_or_refused(name: str) -> None:
    try:
        kept = check_name(name, BASES)
    except AdapterError:
        return
    assert check_name(kept, BASES) == kept
    assert 1 <= len(kept) <= MAX_NAME_LENGTH and kept.strip() == kept
