from __future__ import annotations

import pytest

from tp_engine.params import MAX_LOGPROBS, SamplingParams
from tp_engine.sampling import sampling_needs, slot_init
from tp_engine.sampling.needs import CANDIDATE_SIZES
from tp_engine.steps.plan import SlotInit


@pytest.mark.parametrize(
    ("fields", "candidates", "full"),
    [
        ({"temperature": 0.0}, 1, False),
        ({"temperature": 0.0, "repetition_penalty": 2.0}, 1, False),
        ({"temperature": 0.0, "top_p": 0.5}, 1, False),
        ({"temperature": 0.0, "logprobs": 0}, 1, False),
        ({"temperature": 0.0, "logprobs": 5}, 8, False),
        ({"temperature": 0.0, "logprobs": 5, "logit_bias": {1: 1.0}}, 8, True),
        ({"temperature": 0.0, "logprobs": 0, "min_tokens": 2}, 1, True),
        ({"temperature": 0.0, "logprobs": 0, "presence_penalty": 0.1}, 1, True),
        ({"temperature": 0.5}, 1, True),
        ({"temperature": 0.5, "top_k": 0}, 1, True),
        ({"temperature": 0.5, "top_k": 1}, 1, False),
        ({"temperature": 0.5, "top_k": 9, "top_p": 0.5}, 64, False),
        ({"temperature": 0.5, "top_k": 128}, 128, False),
        ({"temperature": 0.5, "top_k": 129}, 1, True),
        ({"temperature": 0.5, "top_k": 129, "logprobs": 20}, 64, True),
    ],
)
def test_needs_of_one_row(fields: dict[str, object], candidates: int, full: bool) -> None:
    params = SamplingParams(**fields)  # type: ignore[arg-type]  # fields of several types
    assert sampling_needs([params]) == (candidates, [0] if full else [])


def test_needs_of_several_rows_are_the_largest_and_the_listed_ones() -> None:
    greedy = SamplingParams(temperature=0.0)
    plain = SamplingParams(temperature=1.0)
    top = SamplingParams(temperature=1.0, top_k=40)
    assert sampling_needs([greedy, plain, top, plain]) == (64, [1, 3])
    assert sampling_needs([]) == (0, [])


def test_every_number_of_alternatives_fits_into_the_candidates() -> None:
    assert CANDIDATE_SIZES[-1] >= MAX_LOGPROBS


def test_slot_init_suppresses_ends_until_min_tokens_and_leaves_out_unneeded_lists() -> None:
    def init(**fields: object) -> SlotInit:
        return slot_init(
            3,
            SamplingParams(**fields),  # type: ignore[arg-type]  # fields of several types
            seed=11,
            prompt=[5, 6],
            output=[7],
            eos_ids=[1, 2],
            prompt_len=2,
        )

    plain = init(top_k=-1)
    assert (plain.slot, plain.seed, plain.top_k, plain.logprobs) == (3, 11, 0, -1)
    assert (plain.prompt, plain.output, plain.suppressed) == ((), (), ())
    late = init(min_tokens=3, stop_token_ids=(2, 9))
    assert (late.suppressed, late.suppress_before) == ((1, 2, 9), 5)
    assert init(min_tokens=3, stop_token_ids=(9,), ignore_eos=True).suppressed == (9,)
    repeated = init(repetition_penalty=1.5)
    assert (repeated.prompt, repeated.output) == ((5, 6), (7,))
    frequent = init(frequency_penalty=1.5)
    assert (frequent.prompt, frequent.output) == ((), (7,))
