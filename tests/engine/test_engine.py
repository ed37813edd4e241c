"""The engine's decisions, with a worker whose outputs betray any fault in them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake import (
    BLOCK,
    EOS,
    VOCAB,
    add_adapter,
    drive,
    make_engine,
    next_token,
    solo,
    submit,
)
from tp_engine.messages import Failed, Output
from tp_engine.params import ParameterError, SamplingParams
from tp_engine.requests.admission import RequestError
from tp_engine.steps.plan import LAST_SAMPLED, PlanKind


def params(tokens: int, **fields) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, **{"ignore_eos": True, **fields})


def prompts(count: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(count * 1000 + length)
    return rng.integers(1, VOCAB, (count, length)).tolist()


def test_a_request_alone_gives_the_models_tokens() -> None:
    engine, _ = make_engine()
    prompt = prompts(1, 11)[0]
    submit(engine, "a", prompt, params(9))
    assert drive(engine)["a"] == solo("", prompt, params(9))
    assert engine.pool.free + engine.prefix.evictable() == engine.pool.num_pages


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine, worker = make_engine(budget=5)
    prompt = prompts(1, 18)[0]
    submit(engine, "a", prompt, params(2))
    assert drive(engine)["a"] == solo("", prompt, params(2))
    assert [plan.tokens.size for plan in worker.plans] == [5, 5, 5, 3, 1]
    assert engine.scheduler.counters.chunked_prefills == 3


def test_decoding_requests_get_their_row_before_any_prompt() -> None:
    engine, worker = make_engine(budget=4, slots=2)
    first, second = prompts(2, 8)
    submit(engine, "a", first, params(20))
    engine.step()
    engine.step()
    submit(engine, "b", second, params(2))
    engine.step()
    sequences = worker.plans[-1].sequences.reshape(-1, 4).tolist()
    assert sorted(rows for _, rows, _, _ in sequences) == [1, 3]


def test_the_row_after_a_sampled_one_names_the_slot_not_the_token() -> None:
    engine, worker = make_engine()
    submit(engine, "a", [1, 2, 3], params(3))
    drive(engine)
    assert [plan.tokens.tolist() for plan in worker.plans] == [
        [1, 2, 3],
        [LAST_SAMPLED],
        [LAST_SAMPLED],
    ]


def test_end_tokens_and_stop_tokens_end_an_output_and_are_not_part_of_it() -> None:
    engine, _ = make_engine()
    prompt = next(
        p for p in prompts(400, 3) if len(solo("", p, SamplingParams(max_tokens=30))) < 12
    )
    wanted = solo("", prompt, SamplingParams(max_tokens=30))
    assert wanted[-1] == EOS
    submit(engine, "eos", prompt, SamplingParams(max_tokens=30))
    submit(engine, "stop", prompt, params(30, stop_token_ids=(wanted[0],)))
    submit(engine, "length", prompt, params(1))
    ends: dict[str, Output] = {}
    seen: dict[str, list[int]] = {}
    while engine.requests:
        for output in engine.step():
            assert isinstance(output, Output)
            seen.setdefault(output.request_id, []).extend(output.tokens)
            if output.finish_reason:
                ends[output.request_id] = output
    assert (ends["eos"].finish_reason, ends["eos"].stop_token) == ("stop", EOS)
    assert seen["eos"] == wanted[:-1] and ends["eos"].completion_tokens == len(wanted)
    assert (ends["stop"].stop_token, seen["stop"]) == (wanted[0], [])
    assert (ends["length"].finish_reason, seen["length"]) == ("length", wanted[:1])


def test_equal_prompts_share_pages_but_not_across_adapters_or_salts() -> None:
    engine, _ = make_engine(pages=64)
    revision = add_adapter(engine, "x")
    prompt = prompts(1, 3 * BLOCK + 1)[0]
    cases = [("", None), ("", None), ("", revision), ("salt", None), ("", revision)]
    hits = []
    for i, (salt, adapter) in enumerate(cases):
        submit(engine, str(i), prompt, params(2), adapter, salt)
        before = engine.scheduler.counters.prefix_hit_tokens
        outputs = drive(engine)
        hits.append(engine.scheduler.counters.prefix_hit_tokens - before)
        assert outputs[str(i)] == solo("x" if adapter else "", prompt, params(2))
    assert hits == [0, 3 * BLOCK, 0, 0, 3 * BLOCK]


def test_a_wholly_cached_prompt_still_computes_its_last_token() -> None:
    engine, worker = make_engine()
    prompt = prompts(1, 2 * BLOCK)[0]
    for name in ("a", "b"):
        submit(engine, name, prompt, params(1))
        assert drive(engine)[name] == solo("", prompt, params(1))
    assert worker.plans[-1].tokens.size == BLOCK


def test_a_request_that_waits_for_pages_does_not_count_as_a_use_of_what_is_cached() -> None:
    engine, _ = make_engine(pages=8, budget=16)
    submit(engine, "a", [1] * 8 + [2], params(2))
    drive(engine)
    before = dict(engine.prefix._weight)
    submit(engine, "hog", [9] * 16, params(4))
    engine.step()
    submit(engine, "b", [1] * 8 + [3] * 12, params(2))
    for _ in range(2):
        engine.step()
        assert [request.id for request in engine.scheduler.waiting] == ["b"]
    assert {page: engine.prefix._weight[page] for page in before} == before
    assert drive(engine)["b"] == solo("", [1] * 8 + [3] * 12, params(2))


def test_generated_tokens_can_be_found_again_as_a_prompt() -> None:
    engine, _ = make_engine()
    prompt = prompts(1, BLOCK)[0]
    submit(engine, "a", prompt, params(2 * BLOCK))
    longer = prompt + drive(engine)["a"] + [1]
    submit(engine, "b", longer, params(1))
    drive(engine)
    # The last generated token was never computed, so its block is not known.
    assert engine.scheduler.counters.prefix_hit_tokens == 2 * BLOCK


def test_when_pages_run_out_the_youngest_computes_again_and_nothing_changes() -> None:
    engine, _ = make_engine(pages=8, slots=3, prefix_caching=False)
    asked = prompts(3, 7)
    for i, prompt in enumerate(asked):
        submit(engine, str(i), prompt, params(16))
    outputs = drive(engine)
    assert engine.scheduler.counters.preemptions > 0
    for i, prompt in enumerate(asked):
        assert outputs[str(i)] == solo("", prompt, params(16))
    assert engine.pool.free == 8


def test_the_oldest_is_never_preempted() -> None:
    engine, _ = make_engine(pages=8, slots=3)
    for i, prompt in enumerate(prompts(3, 7)):
        submit(engine, str(i), prompt, params(16))
    while "0" in engine.requests:
        engine.step()
        if "0" in engine.requests:
            assert engine.scheduler.running[0].id == "0"


def test_adapters_rotate_through_room_for_two() -> None:
    engine, _ = make_engine(pages=10, slots=4)
    revisions = {name: add_adapter(engine, name, pages=3) for name in "abcde"}
    asked = {}
    for i, prompt in enumerate(prompts(12, 6)):
        name = "abcde"[i % 5] if i % 6 else ""
        asked[str(i)] = (name, prompt)
        submit(engine, str(i), prompt, params(6), revisions.get(name))
    outputs = drive(engine)
    for key, (name, prompt) in asked.items():
        assert outputs[key] == solo(name, prompt, params(6))
    assert engine.residency.evictions > 0
    assert all(taken > 0 for taken in engine.pool.taken_over.values())


def test_an_adapter_load_waits_and_leaves_running_requests_alone() -> None:
    engine, _ = make_engine(pages=6, slots=4)
    first, second = (add_adapter(engine, name, pages=3) for name in "ab")
    submit(engine, "0", [1, 2], params(6), first)
    engine.step()
    submit(engine, "1", [1, 2], params(6), second)
    engine.step()
    assert [r.footprint.name for r in engine.residency.residents] == ["a"]
    outputs = drive(engine)
    assert outputs["1"] == solo("b", [1, 2], params(6))


def test_rows_of_one_adapter_are_neighbours() -> None:
    engine, worker = make_engine(slots=6, budget=30)
    revisions = [None, add_adapter(engine, "a"), add_adapter(engine, "b")]
    for i in range(6):
        submit(engine, str(i), [1 + i, 2], params(3), revisions[i % 3])
    drive(engine)
    full = max(worker.plans, key=lambda plan: plan.sequences.size)
    descriptors = full.segments.reshape(-1, 2)[:, 1].tolist()
    assert len(descriptors) == len(set(descriptors)) == 3


def test_an_aborted_request_gives_everything_back_at_once() -> None:
    engine, _ = make_engine(pages=12, slots=1, prefix_caching=False)
    revision = add_adapter(engine, "a")
    submit(engine, "running", [1, 2, 3], params(30), revision)
    submit(engine, "waiting", [1, 2, 3], params(30), revision)
    engine.step()
    for name in ("running", "waiting", "unknown"):
        engine.abort(name)
    assert engine.step() == []
    assert engine.pool.free == 10
    assert engine.residency.residents[0].users == 0
    assert engine.counters["aborted"] == 2
    assert engine.check_integrity() == []


def test_what_can_never_run_is_refused_and_nothing_else_notices() -> None:
    engine, _ = make_engine(pages=8, max_model_len=40)
    revision = add_adapter(engine, "a", pages=4)
    submit(engine, "ok", [1, 2], params(5))
    refused = {
        "prompt": ([], params(1)),
        "max_tokens": ([1] * 10, params(31)),
        "stop_token_ids": ([1], params(1, stop_token_ids=(VOCAB,))),
        "logit_bias": ([1], params(1, logit_bias={-1: 1.0})),
    }
    for field, (prompt, fields) in refused.items():
        with pytest.raises(RequestError) as error:
            submit(engine, field, prompt, fields)
        assert error.value.param == field
    for prompt in ([VOCAB], [-1], [1] * 40):
        with pytest.raises(RequestError, match="prompt"):
            submit(engine, "x", prompt, params(1))
    with pytest.raises(RequestError, match="open already"):
        submit(engine, "ok", [1], params(1))
    with pytest.raises(RequestError, match="5 pages for 20 tokens and 4 for its adapter"):
        submit(engine, "x", [1] * 10, params(10), revision)
    unlimited = SamplingParams(max_tokens=None)
    for length in (16, 20):  # that its adapter leaves no page for, though the context would hold it
        with pytest.raises(RequestError, match="and 4 for its adapter") as error:
            submit(engine, "x", [1] * length, unlimited, revision)
        assert error.value.param == "prompt"
    assert drive(engine) == {"ok": solo("", [1, 2], params(5))}


def test_an_adapter_larger_than_the_arena_is_refused() -> None:
    engine, _ = make_engine(pages=4)
    with pytest.raises(ValueError, match=r"needs 4 pages .* has 4 pages"):
        add_adapter(engine, "a", pages=4)


def test_a_row_without_a_token_fails_its_request_alone() -> None:
    engine, worker = make_engine()
    run = worker.run

    def poisoned(plan, images=None):
        sampled = run(plan, images)
        if sampled is not None and len(sampled.tokens) == 2:
            sampled.failed[0] = True
        return sampled

    worker.run = poisoned  # type: ignore[method-assign]
    submit(engine, "a", [1, 2], params(5))
    submit(engine, "b", [3, 4], params(5))
    first = engine.step()
    assert [type(output) for output in first] == [Failed, Output]
    worker.run = run  # type: ignore[method-assign]
    rest = drive(engine)
    assert [next_token("", [3, 4]), *rest["b"]] == solo("", [3, 4], params(5))
    assert "a" not in rest and engine.counters["failed"] == 1


def test_a_plan_is_made_while_the_step_before_it_runs_and_surplus_tokens_are_dropped() -> None:
    engine, worker = make_engine(depth=2)
    prompt = next(
        p for p in prompts(400, 3) if 3 < len(solo("", p, SamplingParams(max_tokens=30))) < 12
    )
    wanted = solo("", prompt, SamplingParams(max_tokens=30))
    submit(engine, "a", prompt, SamplingParams(max_tokens=30))
    assert engine.step() == [] and len(worker.plans) == 1
    assert len(engine.step()) == 1 and len(worker.plans) == 2
    outputs = drive(engine)
    assert [wanted[0], *outputs["a"]] == wanted
    assert len(worker.plans) == len(wanted) + 1, "one surplus row, planned before the end was known"
    assert engine.counters["generation_tokens"] == len(wanted)
    submit(engine, "b", [7, 8], params(4))
    before = len(worker.plans)
    assert drive(engine)["b"] == solo("", [7, 8], params(4))
    assert len(worker.plans) == before + 4, "max_tokens is known when planning"


def test_a_step_that_nobody_looked_for_is_not_taken_for_a_slow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = make_engine(pages=64, depth=2, budget=200, max_model_len=200)
    now = 1000.0
    monkeypatch.setattr("tp_engine.engine.time.monotonic", lambda: now)
    submit(engine, "a", [1] * 100, params(5))
    engine.step()
    engine.abort("a")
    before = engine.books.prices.kv
    now += 3600.0
    submit(engine, "b", [1], params(5))
    while engine.requests:
        engine.step()
    assert engine.books.prices.kv == before


def test_heartbeats_and_steps_share_one_numbering() -> None:
    engine, worker = make_engine()
    engine.control(PlanKind.HEARTBEAT)
    submit(engine, "a", [1], params(2))
    drive(engine)
    assert [plan.step for plan in worker.plans] == [1, 2]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_mix_gives_each_request_its_solo_output(data: st.DataObject) -> None:
    pages = data.draw(st.integers(9, 24))
    engine, _ = make_engine(
        pages,
        slots=data.draw(st.integers(1, 5)),
        budget=data.draw(st.integers(5, 20)),
        depth=data.draw(st.integers(1, 3)),
    )
    revisions = {
        name: add_adapter(engine, name, pages=data.draw(st.integers(1, 3))) for name in "abc"
    }
    shared = prompts(1, 9)[0]
    asked = {}
    for i in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from(["", "a", "b", "c"]))
        tail = data.draw(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=5))
        prompt = shared[: data.draw(st.integers(0, 9))] + tail
        wanted = SamplingParams(max_tokens=data.draw(st.integers(1, 10)))
        asked[str(i)] = (name, prompt, wanted)
        submit(engine, str(i), prompt, wanted, revisions.get(name))
        for _ in range(data.draw(st.integers(0, 2))):
            for output in engine.step():
                asked[output.request_id] += (output,)
    outputs: dict[str, list[int]] = {}
    for key, (_, _, _, *early) in asked.items():
        for output in early:
            ended = [] if output.stop_token is None else [output.stop_token]
            outputs.setdefault(key, []).extend(output.tokens + ended)
    for key, tokens in drive(engine).items():
        outputs.setdefault(key, []).extend(tokens)
    for key, (name, prompt, wanted, *_) in asked.items():
        assert outputs[key] == solo(name, prompt, wanted)
    assert engine.pool.free + engine.prefix.evictable() + engine.residency.evictable() == pages


def test_parameters_are_refused_by_name_value_and_range() -> None:
    for fields in (
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 2.0},
        {"top_k": -2},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"frequency_penalty": float("nan")},
        {"max_tokens": 0},
        {"logprobs": 65},
        {"logit_bias": {1: 101.0}},
        {"stop": ("",)},
        {"stop": ("a",) * 17},
        {"stop": "END"},
        {"stop_token_ids": (5,) * 1025},
        {"seed": 2**63},
        {"min_tokens": -1},
    ):
        with pytest.raises(ParameterError) as error:
            SamplingParams(**fields)
        assert error.value.param == next(iter(fields))
        assert error.value.param in str(error.value)


def test_without_max_tokens_an_output_fills_what_context_and_arena_leave() -> None:
    engine, _ = make_engine(pages=8, max_model_len=40)
    revision = add_adapter(engine, "a", pages=4)
    assert engine.context == 4 * BLOCK
    submit(engine, "base", [1, 2], SamplingParams(max_tokens=None, ignore_eos=True))
    submit(engine, "a", [1, 2], SamplingParams(max_tokens=None, ignore_eos=True), revision)
    assert {key: len(tokens) + 2 for key, tokens in drive(engine).items()} == {
        "base": 8 * BLOCK,
        "a": 4 * BLOCK,
    }


@pytest.mark.parametrize(("pages", "slots", "length", "tokens"), [(6, 2, 7, 8), (9, 3, 7, 16)])
def test_a_preempted_request_waits_for_its_tokens_that_are_under_way(
    pages: int, slots: int, length: int, tokens: int
) -> None:
    engine, _ = make_engine(pages=pages, slots=slots, budget=5, depth=3)
    asked = prompts(3, length)
    for i, prompt in enumerate(asked):
        submit(engine, str(i), prompt, params(tokens))
    outputs = drive(engine)
    for i, prompt in enumerate(asked):
        assert outputs[str(i)] == solo("", prompt, params(tokens))
