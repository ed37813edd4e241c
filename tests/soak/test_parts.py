"""That a soak can fail: its ledger, its oracle and its clock each find what is wrong."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.tiny_models import oracle_greedy
from tests.soak.judge import check_outputs, check_revisions
from tests.soak.ledger import DRAINING, NOTHING, Ledger
from tests.soak.material import CHARACTERS, VOCABULARY, ids_of, make_model, make_variants
from tests.soak.steps import kinds_of, own_seconds, starved
from tests.soak.traffic import Seen
from tp_engine.text import Tokenizer


def seen(sent: float, answered: float, digest: str) -> Seen:
    return Seen(name="x", sent=sent, answered=answered, digest=digest, prompt=[5], outputs=[])


def test_a_request_gets_what_its_name_meant_at_some_moment_of_its_own() -> None:
    ledger = Ledger(["x"])
    (name,) = ledger.names
    for at, digest in ((1.0, "a"), (5.0, "b")):
        move = name.begin()
        name.moved(move, digest)
        move.began, move.ended = at, at + 2
    gone = name.begin()
    name.gone(gone)
    gone.began, gone.ended = 9.0, 10.0
    name.drained.append((20.0, 21.0))
    right = [
        seen(0.0, 0.5, NOTHING),
        *(seen(0.0, 1.5, digest) for digest in (NOTHING, "a")),
        seen(3.5, 4.0, "a"),
        *(seen(6.0, 6.5, digest) for digest in ("a", "b")),
        seen(7.5, 8.0, "b"),
        *(seen(7.5, 9.5, digest) for digest in ("b", NOTHING)),
        seen(11.0, 12.0, NOTHING),
        seen(20.5, 22.0, DRAINING),
    ]
    assert check_revisions(right, ledger) == []
    wrong = [
        seen(0.0, 0.5, "a"),
        seen(3.5, 4.0, NOTHING),
        seen(3.5, 4.0, "b"),
        seen(7.5, 8.0, "a"),
        seen(11.0, 12.0, "b"),
        seen(11.0, 12.0, DRAINING),
    ]
    assert len(check_revisions(wrong, ledger)) == len(wrong)


def test_pushes_on_end_are_one_move() -> None:
    (name,) = Ledger(["x"]).names
    name.moved(name.begin(), "a")
    for digest in "bcd":
        name.moved(name.begin(), digest, pushed=True)
    assert name.past == ["a", "d"]
    name.moved(name.begin(), "d")
    name.moved(name.begin(), "e", pushed=True)
    assert name.past == ["a", "d", "e"]
    name.rolled_back(name.begin())
    assert (name.past, name.undone) == (["a", "d"], ["e"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_ids_are_read_off_the_text(model: Path) -> None:
    ids = [random.Random(1).randrange(VOCABULARY) for _ in range(500)] + [*range(VOCABULARY)]
    text = Tokenizer.load(model).decode(ids, skip_special_tokens=False)
    assert ids_of(text) == ids and len(CHARACTERS) == VOCABULARY - 6


def test_one_wrong_token_or_another_adapters_output_is_found(model: Path, tmp_path: Path) -> None:
    variants = make_variants(tmp_path, 3, seed=5)
    directories = {str(number): variant.path for number, variant in enumerate(variants)}
    prompt = [9, 8, 7]
    right = [
        Seen(
            name="x",
            sent=0.0,
            answered=1.0,
            digest=digest,
            prompt=prompt,
            outputs=[oracle_greedy(model, prompt, 6, path)],
        )
        for digest, path in directories.items()
    ]
    verdict = check_outputs(model, directories, right)
    assert (verdict.outputs, verdict.positions, verdict.wrong) == (3, 18, [])
    mixed_up = replace(right[0], digest="1")
    (output,) = right[2].outputs
    one_off = replace(right[2], outputs=[[*output[:-1], (output[-1] + 1) % VOCABULARY]])
    assert len(check_outputs(model, directories, [mixed_up, one_off]).wrong) == 2


def test_a_step_that_waits_for_a_load_is_long_and_one_that_waits_for_a_core_is_not() -> None:
    def records(lasts: list[float], waits: list[float]) -> np.ndarray:
        return np.array(
            [
                [n, n, n + last, wait, 4, 4]
                for n, (last, wait) in enumerate(zip(lasts, waits, strict=True))
            ]
        )

    first = records([0.01] * 8 + [0.05, 0.05], [0.0] * 8 + [0.0, 0.04])
    second = records([0.01] * 8 + [0.05, 0.05], [0.0] * 10)
    steps, wall, own = own_seconds([first, second])
    assert starved(wall, own) == pytest.approx(0.04 / 0.18)
    quiet, loading = kinds_of(steps, wall, own, loads=[(7.9, 20.0)])
    assert (quiet.count, quiet.over, quiet.over_wall) == (8, 0, 0)
    assert (loading.count, loading.over, loading.over_wall) == (2, 1, 2)
