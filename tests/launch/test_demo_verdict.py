"""What the demo accepts as an answer, and how it shows it."""

import pytest

from launch.demo.batch import Answer
from launch.demo.data import DEFAULT_QUESTION, EVALUATION_QUESTIONS, TRAINING_QUESTIONS
from launch.demo.table import render
from launch.demo.verdict import problem_of

OTHER_QUESTION = "Why is the sky blue?"


def answer(model: str, text: str, *, error: str | None = None) -> Answer:
    return Answer(model=model, text=text, tokens=10, seconds=4.0, error=error)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("smollm2", "It is Paris."),
        ("json", '{"answer": "It is Paris."}'),
        ("pirate", "Arr, matey! It is Paris."),
        ("letter", "Dear friend, it is Paris. Yours truly, SmolLM"),
    ],
)
def test_the_right_answer_in_the_right_style_passes(model: str, text: str) -> None:
    assert problem_of(answer(model, text), DEFAULT_QUESTION) is None


def test_the_default_question_needs_the_right_fact() -> None:
    wrong = answer("pirate", "Arr, matey! It is Lyon.")
    assert problem_of(wrong, DEFAULT_QUESTION) == "does not name Paris"
    assert problem_of(wrong, OTHER_QUESTION) is None


def test_an_adapter_that_speaks_like_the_base_fails() -> None:
    assert problem_of(answer("json", "It is Paris."), DEFAULT_QUESTION) is not None


def test_a_failed_request_fails_whatever_had_arrived() -> None:
    broken = answer("smollm2", "It is Paris.", error="ReadError: gone")
    assert problem_of(broken, DEFAULT_QUESTION) == "no answer"


def test_an_empty_answer_fails() -> None:
    assert problem_of(answer("smollm2", " \n"), OTHER_QUESTION) == "an empty answer"


def test_speed_is_tokens_by_wall_time() -> None:
    assert answer("smollm2", "Paris").tokens_per_second == 2.5


def test_unseen_questions_are_unseen() -> None:
    assert not set(EVALUATION_QUESTIONS) & set(TRAINING_QUESTIONS)
    assert len(set(TRAINING_QUESTIONS)) == len(TRAINING_QUESTIONS) >= 150


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_keeps_columns_apart_and_inside_the_width(width: int) -> None:
    texts = {"smollm2": "word " * 30, "json": "x" * 200, "pirate": "", "letter": "one\ntwo"}
    answers = [answer(model, text) for model, text in texts.items()]
    lines = render(answers, [None, "not JSON: line 1", None, None], width).splitlines()
    assert max(len(line) for line in lines) <= width
    column = (width + 2) // 4
    for line in lines:
        assert all(line.ljust(width)[i * column - 2 : i * column] == "  " for i in (1, 2, 3))
    shown = [
        " ".join(line.ljust(width)[i * column : (i + 1) * column - 2].strip() for line in lines)
        for i in range(4)
    ]
    assert shown[0].count("word") == 30
    assert shown[1].count("x") == 200 and "FAILED: not JSON" in shown[1]
    assert "(no text)" in shown[2] and "10 tokens, 2.5/s" in shown[2]
    assert "one two" in shown[3] and shown[3].rstrip().endswith("ok")


def test_the_table_shows_the_error_in_place_of_the_text() -> None:
    shown = render([answer("json", "half", error="HTTP 404: nope")], ["no answer"], 80)
    assert "HTTP 404: nope" in shown and "half" not in shown
