"""The comparison with an oracle can fail."""

import pytest
import torch

from tests.distributed.agreement import Agreement, assert_agreement, compare

LOGITS = torch.tensor([[0.0, 10.0, 4.0], [5.0, 1.0, 0.0], [-3.0, 2.0, 7.0]])


def test_the_best_tokens_agree() -> None:
    assert compare([1, 0, 2], LOGITS) == Agreement(positions=3, near_ties=0, wrong=[])


@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_wrong_token_anywhere_is_named(at: int) -> None:
    tokens = [1, 0, 2]
    tokens[at] = (tokens[at] + 1) % 3
    (wrong,) = compare(tokens, LOGITS).wrong
    assert wrong.startswith(f"token {at} is {tokens[at]}")
    with pytest.raises(AssertionError, match=f"some request: token {at} is"):
        assert_agreement([("some request", compare(tokens, LOGITS))])


def test_at_a_near_tie_either_contender_is_accepted_and_no_other() -> None:
    tie = torch.tensor([[10.0, 10.0 - 9e-4, 0.0]])
    assert compare([0], tie) == compare([1], tie) == Agreement(positions=1, near_ties=1, wrong=[])
    assert compare([2], tie).wrong


def test_a_gap_just_above_the_limit_is_no_tie() -> None:
    clear = torch.tensor([[10.0, 10.0 - 1.1e-3, 0.0]], dtype=torch.float64)
    assert compare([0], clear).near_ties == 0
    assert compare([1], clear).wrong


def test_the_limit_follows_the_range_of_the_logits() -> None:
    tie = torch.tensor([[10.0, 9.9, -5000.0]])
    assert compare([1], tie) == Agreement(positions=1, near_ties=1, wrong=[])


def test_a_missing_token_is_found() -> None:
    with pytest.raises(AssertionError, match="2 tokens, 3 rows"):
        compare([1, 0], LOGITS)


def test_too_many_near_ties_prove_nothing() -> None:
    few = Agreement(positions=100, near_ties=1, wrong=[])
    many = Agreement(positions=100, near_ties=2, wrong=[])
    assert_agreement([("few", few)])
    assert_agreement([("few", few), ("none", Agreement(positions=1, near_ties=0, wrong=[]))])
    with pytest.raises(AssertionError, match="3 near-ties in 200"):
        assert_agreement([("few", few), ("many", many)])
    with pytest.raises(AssertionError):
        assert_agreement([])
