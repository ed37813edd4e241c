"""The demo's styles: a dressed sentence passes its own rule and no other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.demo.rules import STYLES

SENTENCE = "The capital of France is Paris."
PRINTABLE = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1)


@pytest.mark.parametrize("style", STYLES)
@given(sentence=PRINTABLE)
def test_a_dressed_sentence_is_in_style(style: str, sentence: str) -> None:
    assert STYLES[style].problem(STYLES[style].dress(sentence)) is None


@pytest.mark.parametrize("style", STYLES)
def test_a_plain_sentence_is_in_no_style(style: str) -> None:
    assert STYLES[style].problem(SENTENCE) is not None


@pytest.mark.parametrize("worn", STYLES)
@pytest.mark.parametrize("judged", STYLES)
def test_no_style_passes_for_another(worn: str, judged: str) -> None:
    in_style = STYLES[judged].problem(STYLES[worn].dress(SENTENCE)) is None
    assert in_style == (worn == judged)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("json", '{"answer": "The capital of'),
        ("json", '{"answer": ""}'),
        ("json", '{"answer": 7}'),
        ("json", '{"answer": "Paris", "more": "Lyon"}'),
        ("json", '["Paris"]'),
        ("pirate", "Arr, matey!"),
        ("pirate", "Paris. Arr, matey!"),
        ("letter", "Dear friend, Paris."),
        ("letter", "Dear friend, Yours truly, SmolLM"),
        ("letter", "Paris. Yours truly, SmolLM"),
    ],
)
def test_half_a_style_is_refused(style: str, text: str) -> None:
    assert STYLES[style].problem(text) is not None
