"""Every sampling field means the same at any world size."""

from collections.abc import Callable

import pytest

from tests.distributed.material import END, SAMPLING, WORLDS
from tests.distributed.torchrun import Run
from tests.distributed.workload import Answer

FIELDS = list(SAMPLING)


def answer(run: Run, field: str, case: str = "sampling") -> Answer:
    return run.result(case).rounds[0][FIELDS.index(field)]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("case", ["sampling", "sampling-overlap"])
@pytest.mark.parametrize("world", WORLDS)
def test_seeded_requests_equal_those_of_one_rank(
    run: Callable[[int], Run], world: int, case: str, field: str
) -> None:
    one, many = answer(run(1), field), answer(run(world), field, case)
    assert many.tokens == one.tokens
    assert many.finish_reason == one.finish_reason
    assert one.logprobs and many.logprobs
    assert len(one.logprobs) == len(one.tokens)
    for a, b in zip(one.logprobs, many.logprobs, strict=True):
        assert a.token == b.token
        assert b.logprob == pytest.approx(a.logprob, abs=1e-4)
        assert len(a.top_ids) == 4
        assert b.top_logprobs == pytest.approx(a.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("world", [1, 2])
def test_the_fields_have_their_effects(run: Callable[[int], Run], world: int) -> None:
    def tokens(field: str) -> list[int]:
        return answer(run(world), field).tokens

    greedy = answer(run(world), "greedy")
    assert greedy.logprobs is not None
    assert all(item.token == item.top_ids[0] for item in greedy.logprobs)
    top_one = answer(run(world), "top_k_one")
    assert all(item.token == item.top_ids[0] for item in top_one.logprobs or [])
    assert len(set(tokens("presence_penalty"))) > len(set(greedy.tokens))
    assert 127 not in tokens("logit_bias")
    assert len(tokens("min_tokens")) == 6 and END not in tokens("min_tokens")
    assert answer(run(world), "min_tokens").finish_reason == "stop"
    assert len(tokens("stop_token_ids")) == 3 and 77 not in tokens("stop_token_ids")
    assert tokens("ignore_eos") == [END] * 20
