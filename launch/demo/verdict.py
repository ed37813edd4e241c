"""What an answer of the demo must be like."""

from launch.demo.batch import Answer
from launch.demo.data import DEFAULT_QUESTION
from launch.demo.rules import STYLES

__all__ = ["problem_of"]

FACT = "Paris"


def problem_of(answer: Answer, question: str) -> str | None:
    """What is wrong with `answer`, or None.

    An adapter has to keep to its style, the base has to say something; the default question has
    one right answer, which everyone has to give.
    """
    if answer.error is not None:
        return "no answer"
    if not answer.text.strip():
        return "an empty answer"
    if question == DEFAULT_QUESTION and FACT not in answer.text:
        return f"does not name {FACT}"
    style = STYLES.get(answer.model)
    return style.problem(answer.text) if style else None
