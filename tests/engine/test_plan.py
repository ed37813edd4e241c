"""The plan protocol: what is encoded comes back, and nothing else is read."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_engine.steps import plan as protocol
from tp_engine.steps.plan import (
    HEADER_WORDS,
    LAST_SAMPLED,
    NO_ADAPTER,
    PlanError,
    PlanKind,
    SlotInit,
    StepPlan,
    bits_float,
    float_bits,
)

WORD = st.integers(-(2**63), 2**63 - 1)
SCALARS = ("max_rank", "traits", "candidates")
ARRAYS = [f.name for f in dataclasses.fields(StepPlan) if f.name not in ("kind", "step", *SCALARS)]
SMALL = StepPlan(
    kind=PlanKind.STEP,
    step=7,
    tokens=np.array([5, LAST_SAMPLED, 6], np.int64),
    segments=np.array([1, NO_ADAPTER, 2, 40], np.int64),
    max_rank=8,
    traits=3,
)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Any plan, long enough at times for a second broadcast."""
    fields: dict[str, Any] = {
        name: np.array(draw(st.lists(WORD, max_size=8)), np.int64) for name in ARRAYS
    }
    fields["tokens"] = np.repeat(fields["tokens"], draw(st.sampled_from([1, 700])))
    fields |= {name: draw(st.integers(0, 2**40)) for name in SCALARS}
    return StepPlan(
        kind=draw(st.sampled_from(PlanKind)), step=draw(st.integers(0, 2**62)), **fields
    )


def assert_equal(got: StepPlan, wanted: StepPlan) -> None:
    for field in dataclasses.fields(StepPlan):
        a, b = getattr(got, field.name), getattr(wanted, field.name)
        assert np.array_equal(a, b), field.name
        assert type(a) is type(b), field.name


@given(plans(), st.integers(0, 9))
def test_a_plan_comes_back_whatever_follows_it(plan: StepPlan, padding: int) -> None:
    words = plan.encode()
    assert words.dtype == np.int64
    assert words[4] == words.size
    assert_equal(StepPlan.decode(words), plan)
    assert_equal(StepPlan.decode(np.concatenate([words, np.full(padding, 77)])), plan)


def test_markers_are_no_token_ids_and_no_descriptors() -> None:
    decoded = StepPlan.decode(SMALL.encode())
    assert decoded.tokens.tolist() == [5, LAST_SAMPLED, 6]
    assert decoded.segments.reshape(-1, 2)[0].tolist() == [1, NO_ADAPTER]
    assert LAST_SAMPLED < 0 and NO_ADAPTER < 0


@pytest.mark.parametrize("other", [protocol.VERSION - 1, protocol.VERSION + 1, 0, -1])
def test_another_version_is_refused_with_both_numbers(other: int) -> None:
    words = SMALL.encode()
    words[1] = other
    with pytest.raises(PlanError, match=rf"version {other}; this rank speaks {protocol.VERSION}$"):
        StepPlan.decode(words)


def test_a_rank_of_another_version_refuses_our_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    words = SMALL.encode()
    monkeypatch.setattr(protocol, "VERSION", protocol.VERSION + 1)
    with pytest.raises(PlanError, match="version"):
        StepPlan.decode(words)


def test_what_is_no_plan_is_refused() -> None:
    words = SMALL.encode()
    words[0] += 1
    for other in (words, np.zeros(0, np.int64), np.zeros(64, np.int64)):
        with pytest.raises(PlanError, match="not a step plan"):
            StepPlan.decode(other)


@given(plans(), st.data())
def test_a_plan_cut_off_anywhere_is_refused(plan: StepPlan, data: st.DataObject) -> None:
    words = plan.encode()
    kept = data.draw(st.integers(0, words.size - 1))
    with pytest.raises(PlanError):
        StepPlan.decode(words[:kept])


@pytest.mark.parametrize("change", [-1, 1, 2**40, -(2**40)])
@pytest.mark.parametrize("field", range(HEADER_WORDS - 5))
def test_a_wrong_field_length_is_refused(field: int, change: int) -> None:
    words = SMALL.encode()
    words[5 + field] += change
    with pytest.raises(PlanError, match="field lengths"):
        StepPlan.decode(words)


def test_an_unknown_kind_is_refused() -> None:
    words = SMALL.encode()
    words[2] = len(PlanKind)
    with pytest.raises(PlanError, match="unknown kind"):
        StepPlan.decode(words)


@given(st.lists(st.floats(), max_size=9))
def test_floats_travel_as_their_bits(values: list[float]) -> None:
    bits = float_bits(values)
    assert float_bits(bits_float(np.array(bits, np.int64))) == bits  # NaN payloads too
    assert all(-(2**63) <= word < 2**63 for word in bits)


FINITE = st.floats(allow_nan=False)
IDS = st.lists(st.integers(0, 2**31), max_size=6).map(tuple)


@st.composite
def slot_inits(draw: st.DrawFn) -> SlotInit:
    bias = draw(IDS)
    size = len(bias)
    return SlotInit(
        slot=draw(st.integers(0, 4096)),
        temperature=draw(FINITE),
        top_p=draw(FINITE),
        min_p=draw(FINITE),
        repetition_penalty=draw(FINITE),
        presence_penalty=draw(FINITE),
        frequency_penalty=draw(FINITE),
        top_k=draw(st.integers(0, 2**31)),
        seed=draw(WORD),
        logprobs=draw(st.integers(-1, 64)),
        suppress_before=draw(st.integers(0, 2**31)),
        bias_ids=bias,
        bias_values=tuple(draw(st.lists(FINITE, min_size=size, max_size=size))),
        suppressed=draw(IDS),
        prompt=draw(IDS),
        output=draw(IDS),
    )


@given(st.lists(slot_inits(), max_size=5))
def test_slots_come_back_through_a_plan(inits: list[SlotInit]) -> None:
    opens = np.array([word for init in inits for word in init.encode()], np.int64)
    plan = StepPlan.decode(StepPlan(kind=PlanKind.STEP, step=0, opens=opens).encode())
    assert SlotInit.decode_all(plan.opens) == inits
