"""The three styles of the demo adapters: how a sentence is dressed, and how to tell that it was."""

import json
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["STYLES", "Style"]

GREETING, CLOSING, SIGNATURE = "Dear friend,", "Yours truly,", "SmolLM"
SHOUT = "Arr, matey!"


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """One way of answering."""

    dress: Callable[[str], str]
    """Turns a plain sentence into an answer in this style (a training target)."""

    problem: Callable[[str], str | None]
    """Says what keeps an answer from being in this style; None when nothing does."""


def _json_dress(sentence: str) -> str:
    # So small a model hardly learns to escape quotation marks: it is shown none.
    return json.dumps({"answer": sentence.replace('"', "'")}, ensure_ascii=False)


def _json_problem(text: str) -> str | None:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return f"not JSON: {error}"
    if not isinstance(value, dict) or list(value) != ["answer"]:
        return 'not an object with the one key "answer"'
    if not isinstance(value["answer"], str) or not value["answer"].strip():
        return '"answer" is not a sentence'
    return None


def _pirate_problem(text: str) -> str | None:
    body = text.strip()
    if not body.startswith(SHOUT):
        return f'does not begin with "{SHOUT}"'
    return None if body.removeprefix(SHOUT).strip() else f'nothing follows "{SHOUT}"'


def _letter_problem(text: str) -> str | None:
    body = text.strip()
    if not body.startswith(GREETING):
        return f'does not begin with "{GREETING}"'
    message, closing, _ = body.removeprefix(GREETING).partition(CLOSING)
    if not closing:
        return f'has no "{CLOSING}"'
    return None if message.strip() else "has nothing between greeting and closing"


STYLES = {
    "json": Style(
        dress=_json_dress,
        problem=_json_problem,
    ),
    "pirate": Style(dress=lambda sentence: f"{SHOUT} {sentence}", problem=_pirate_problem),
    "letter": Style(
        dress=lambda sentence: f"{GREETING} {sentence} {CLOSING} {SIGNATURE}",
        problem=_letter_problem,
    ),
}
