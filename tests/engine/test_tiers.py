"""Adapters on their way up: who waits, who does not, and what is left when something goes wrong."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake import add_adapter, drive, image, make_engine, solo, submit
from tp_engine.adapters import ImageSize
from tp_engine.engine import Engine
from tp_engine.messages import Failed, Output, Submit
from tp_engine.params import SamplingParams
from tp_engine.requests.admission import RequestError
from tp_engine.steps.plan import PlanKind, StepPlan

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
PROMPT = [5, 6, 7]


class Store:
    """Reads adapters when it is let."""

    def __init__(self, *, open_: bool = True) -> None:
        self.gate = threading.Event()
        self.broken: set[str] = set()
        self.reads: list[str] = []
        if open_:
            self.gate.set()

    def fetch(self, digest: str) -> list[Any]:
        assert self.gate.wait(10)
        self.reads.append(digest)
        if digest in self.broken:
            raise OSError(5, "Input/output error")
        return [image(digest)]


def know(engine: Engine, *names: str) -> None:
    """Let requests use adapters of two pages that only the store has."""
    for name in names:
        engine.roster.begin(name, name, ImageSize(2, 8, 4, 0, 200), None)


def ask(
    engine: Engine, request_id: str, digest: str, *, wait: bool = True, tokens: int = 8
) -> None:
    message = Submit(
        request_id=request_id,
        model=digest or "base",
        prompt=PROMPT,
        params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        wait_for_adapter=wait,
    )
    engine.submit(message, digest)


def settle(engine: Engine) -> None:
    """Let everything that is under way end."""
    deadline = time.monotonic() + 10
    while engine.tiers.busy:
        assert time.monotonic() < deadline
        engine.roster.adopt_delivered()


def test_steps_go_on_while_an_adapter_is_read_and_copied() -> None:
    store = Store(open_=False)
    engine, worker = make_engine(fetch=store.fetch)
    know(engine, "x")
    submit(engine, "old", PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
    engine.step()
    ask(engine, "new", "x")
    tokens = [len(engine.step()) for _ in range(10)]
    store.gate.set()
    while engine.tiers.fetcher.peek() is None:
        time.sleep(0.001)
    while not worker.copying:
        tokens.append(len(engine.step()))
    worker.stopped = True  # the copy to come never ends
    tokens += [len(engine.step()) for _ in range(10)]
    assert set(tokens) == {1}, "the running request has a token in every step"
    worker.stopped = False
    outputs = drive(engine)
    assert outputs["new"] == solo("x", PROMPT, PARAMS)


def test_younger_requests_pass_one_whose_adapter_is_on_its_way() -> None:
    store = Store(open_=False)
    engine, _ = make_engine(fetch=store.fetch)
    know(engine, "x")
    add_adapter(engine, "warm")
    ask(engine, "first", "x")
    ask(engine, "second", "")
    ask(engine, "third", "warm")
    ended: list[str] = []
    while len(ended) < 2:
        ended += [o.request_id for o in engine.step() if isinstance(o, Output) and o.finish_reason]
    assert ended == ["second", "third"] and list(engine.requests) == ["first"]
    assert engine.stats().gauges["num_requests_waiting"] == 1
    store.gate.set()
    assert drive(engine)["first"] == solo("x", PROMPT, PARAMS)


def test_waste_is_what_pages_hold_beside_rows_and_tokens() -> None:
    engine, _ = make_engine()
    know(engine, "x")
    ask(engine, "a", "x")
    while not engine.scheduler.running:
        engine.step()
    gauges = engine.stats().gauges
    assert gauges["waste_adapters_bytes"] == 2 * engine.layout.page_bytes - 200
    computed = engine.scheduler.running[0].computed
    assert gauges["pages_kv"] == len(engine.scheduler.running[0].pages)
    assert gauges["waste_kv_tokens"] == -computed % engine.layout.block_tokens > 0
    drive(engine)
    assert engine.stats().gauges["waste_kv_tokens"] == 0


def test_an_adapter_is_read_once_for_all_that_wait_for_it() -> None:
    store = Store()
    engine, _ = make_engine(fetch=store.fetch)
    know(engine, "x", "y")
    for number in range(6):
        ask(engine, str(number), "xy"[number % 2])
    outputs = drive(engine)
    assert all(outputs[str(n)] == solo("xy"[n % 2], PROMPT, PARAMS) for n in range(6))
    assert store.reads == ["x", "y"]


def test_an_aborted_request_leaves_the_queue_at_once_and_nothing_behind() -> None:
    store = Store(open_=False)
    engine, _ = make_engine(fetch=store.fetch)
    know(engine, "x", "y")
    for name in ("x", "y"):
        ask(engine, name, name)
        engine.abort(name)
    assert engine.scheduler.parked == {} and not engine.requests
    store.gate.set()
    settle(engine)
    assert store.reads == ["x"], "what is not wanted any more is not read"
    assert engine.tiers.host.free == engine.tiers.host.num_pages
    assert engine.check_integrity() == []


def test_who_will_not_wait_is_refused_and_served_once_it_is_there() -> None:
    store = Store()
    engine, _ = make_engine(fetch=store.fetch)
    know(engine, "x")
    with pytest.raises(RequestError) as refusal:
        ask(engine, "a", "x", wait=False)
    assert refusal.value.code == "adapter_loading" and not engine.requests
    settle(engine)
    ask(engine, "a", "x", wait=False)
    assert drive(engine)["a"] == solo("x", PROMPT, PARAMS)


def test_who_will_not_wait_hears_that_the_adapter_cannot_be_read() -> None:
    store = Store()
    store.broken.add("x")
    engine, _ = make_engine(fetch=store.fetch)
    know(engine, "x")
    codes = []
    for _ in range(4):
        with pytest.raises(RequestError) as refusal:
            ask(engine, "a", "x", wait=False)
        codes.append(refusal.value.code)
        settle(engine)
    assert codes == ["adapter_loading", "adapter_unavailable"] * 2
    assert "Input/output error" in str(refusal.value) and store.reads == ["x", "x"]
    store.broken.clear()
    with pytest.raises(RequestError, match="try again"):
        ask(engine, "a", "x", wait=False)
    settle(engine)
    ask(engine, "a", "x", wait=False)
    assert drive(engine)["a"] == solo("x", PROMPT, PARAMS)


def test_the_queue_for_cold_adapters_is_bounded_and_for_others_is_not() -> None:
    store = Store(open_=False)
    engine, _ = make_engine(fetch=store.fetch, adapter_queue=2)
    know(engine, "x", "y")
    ask(engine, "a", "x")
    ask(engine, "b", "y")
    with pytest.raises(RequestError) as refusal:
        ask(engine, "c", "x")
    assert refusal.value.code == "overloaded"
    ask(engine, "base", "")
    engine.abort("a")
    ask(engine, "c", "x")
    store.gate.set()
    assert set(drive(engine)) == {"b", "c", "base"}


def test_without_a_queue_a_cold_adapter_is_refused_and_served_once_it_is_there() -> None:
    engine, _ = make_engine(fetch=Store().fetch, adapter_queue=0)
    know(engine, "x")
    with pytest.raises(RequestError) as refusal:
        ask(engine, "a", "x")
    assert refusal.value.code == "overloaded"
    settle(engine)
    ask(engine, "a", "x")
    assert drive(engine)["a"] == solo("x", PROMPT, PARAMS)


def test_an_adapter_that_cannot_be_read_fails_its_requests_alone() -> None:
    store = Store()
    store.broken.add("x")
    engine, _ = make_engine(fetch=store.fetch)
    know(engine, "x", "y")
    for number, name in enumerate(("x", "y", "x", "")):
        ask(engine, str(number), name)
    failed: list[Failed] = []
    outputs: dict[str, list[int]] = {}
    while engine.requests:
        for output in engine.step():
            if isinstance(output, Failed):
                failed.append(output)
            else:
                outputs.setdefault(output.request_id, []).extend(output.tokens)
    assert [(f.request_id, f.code) for f in failed] == [
        ("0", "adapter_unavailable"),
        ("2", "adapter_unavailable"),
    ]
    assert "Input/output error" in failed[0].message
    assert outputs == {"1": solo("y", PROMPT, PARAMS), "3": solo("", PROMPT, PARAMS)}
    store.broken.clear()
    ask(engine, "again", "x")
    assert drive(engine)["again"] == solo("x", PROMPT, PARAMS)


def test_an_old_failure_to_read_is_not_held_against_a_later_request() -> None:
    store = Store()
    store.broken.add("x")
    engine, _ = make_engine(fetch=store.fetch)
    know(engine, "x")
    ask(engine, "a", "x")
    settle(engine)  # nobody has stepped since
    engine.abort("a")
    store.broken.clear()
    ask(engine, "b", "x")
    assert drive(engine) == {"b": solo("x", PROMPT, PARAMS)}


def test_a_cold_adapter_finds_room_on_hosts_that_others_want_without_end() -> None:
    """The others stand in the arena, so that their requests do without the hosts' copies."""
    engine, _ = make_engine(pages=64, host_pages=4, fetch=Store().fetch)
    know(engine, "a", "b", "cold")
    outputs: dict[str, list[int]] = {}
    asked = dict.fromkeys("ab", 0)
    deadline = time.monotonic() + 20
    while "cold" not in outputs or "cold" in engine.requests:
        assert time.monotonic() < deadline
        for name in asked:
            if sum(request.model == name for request in engine.requests.values()) < 2:
                ask(engine, f"{name} {asked[name]}", name)
                asked[name] += 1
        if min(asked.values()) == 3:  # both have been served and still are
            ask(engine, "cold", "cold")
            asked = {name: count + 1000 for name, count in asked.items()}
        for output in engine.step():
            assert isinstance(output, Output)
            outputs.setdefault(output.request_id, []).extend(output.tokens)
        assert engine.check_integrity() == []
    assert outputs["cold"] == solo("cold", PROMPT, PARAMS)
    drive(engine)


def test_a_copy_that_is_held_makes_no_room() -> None:
    engine, _ = make_engine(pages=64, host_pages=4, fetch=Store().fetch)
    know(engine, "a", "kept", "cold")
    for name in ("a", "kept"):
        ask(engine, name, name, tokens=30)
    while len(engine.scheduler.running) < 2:
        engine.step()
    engine.roster.keep({"kept"})
    ask(engine, "cold", "cold")
    assert drive(engine)["cold"] == solo("cold", PROMPT, PARAMS)
    assert engine.roster.is_warm("kept") and not engine.roster.is_warm("a")


def test_who_runs_alone_waits_for_what_lands_rather_than_compute_again() -> None:
    engine, worker = make_engine(pages=8, slots=2)
    add_adapter(engine, "x", pages=3)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    submit(engine, "old", PROMPT, params)
    engine.step()
    ask(engine, "young", "x")
    while not worker.copying:
        engine.step()
    worker.stopped = True
    while engine.step():
        pass
    (old,) = engine.scheduler.running
    assert old.id == "old" and len(old.pages) == 5 and engine.pool.free == 0
    worker.stopped = False
    while not old.ended:
        engine.step()
        assert old.ended or engine.scheduler.running[0] is old
    assert old.tokens == PROMPT + solo("", PROMPT, params)
    drive(engine)


def test_more_adapters_than_the_hosts_hold_all_get_their_turn() -> None:
    store = Store()
    engine, worker = make_engine(fetch=store.fetch, host_pages=5)
    names = [f"a{i}" for i in range(7)]
    for name in names:
        add_adapter(engine, name)
    assert len(worker.images) == 2, "ranks hold what the host has room for"
    for turn in range(3):
        for name in names:
            ask(engine, f"{name} {turn}", name)
    outputs = drive(engine)
    for name in names:
        for turn in range(3):
            assert outputs[f"{name} {turn}"] == solo(name, PROMPT, PARAMS)
    settle(engine)
    assert len(worker.images) <= 2 and engine.tiers.host.evictions > 0


def test_what_is_kept_stays_on_the_hosts_and_is_fetched() -> None:
    store = Store()
    engine, _ = make_engine(fetch=store.fetch, host_pages=6)
    know(engine, "kept", *(f"{x}{i}" for x in "ab" for i in range(6)))
    engine.roster.keep({"kept", "unknown"})
    settle(engine)
    for number in range(6):
        ask(engine, str(number), f"a{number}")
        drive(engine)
        assert engine.roster.is_warm("kept")
    engine.roster.keep(set())
    for number in range(6):
        ask(engine, str(number), f"b{number}")
        drive(engine)
    assert not engine.roster.is_warm("kept")


def test_what_is_kept_is_brought_to_the_hosts_even_if_it_is_resident() -> None:
    store = Store()
    engine, _ = make_engine(fetch=store.fetch, host_pages=2)
    know(engine, "x", "y")
    for name in ("x", "y"):
        ask(engine, name, name)
        drive(engine)
    assert engine.residency.is_resident(0) and not engine.roster.is_warm("x")
    engine.roster.keep({"x"})
    settle(engine)
    assert engine.roster.is_warm("x") and store.reads == ["x", "y", "x"]


def test_other_ranks_hear_of_rank_0_while_nothing_can_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tp_engine.engine.SILENCE_SECONDS", 0.005)
    store = Store(open_=False)
    engine, _ = make_engine(fetch=store.fetch)
    sent: list[PlanKind] = []
    engine.worker.channel.send = lambda plan: sent.append(plan.kind)  # type: ignore[method-assign]
    know(engine, "x")
    ask(engine, "a", "x")
    deadline = time.monotonic() + 10
    while sent.count(PlanKind.HEARTBEAT) < 3:
        assert time.monotonic() < deadline
        assert engine.step() == []
    store.gate.set()
    assert drive(engine)["a"] == solo("x", PROMPT, PARAMS)


def test_other_ranks_hear_of_rank_0_while_a_start_waits_for_a_delivery(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tp_engine.engine.SILENCE_SECONDS", 0.005)
    engine, worker = make_engine()
    heard = 0

    def send(plan: StepPlan) -> None:
        nonlocal heard
        heard += plan.kind is PlanKind.HEARTBEAT
        worker.stopped = heard < 3

    engine.worker.channel.send = send  # type: ignore[method-assign]
    worker.stopped = True
    timer = threading.Timer(2, setattr, (worker, "stopped", False))
    timer.start()
    engine.roster.start("x", "x", ImageSize(2, 8, 4, 0, 200), [image("x")])  # type: ignore[list-item]
    timer.cancel()
    assert heard == 3 and "x" in engine.adapters


def test_a_revision_that_goes_while_it_is_copied_is_forgotten_when_it_has_landed() -> None:
    engine, worker = make_engine()
    add_adapter(engine, "x")
    ask(engine, "a", "x")
    engine.step()
    worker.stopped = True
    engine.abort("a")
    engine.unregister("x")
    assert "x" not in engine.adapters and worker.images
    worker.stopped = False
    settle(engine)
    engine.roster.adopt_delivered()
    assert not worker.images and not engine.residency.residents
    assert engine.pool.free == engine.pool.num_pages
    assert engine.check_integrity() == []


EVENTS = ["ask", "ask", "abort", "stall", "go", "step", "step"]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 39)), min_size=8, max_size=40),
    st.integers(9, 16),
    st.integers(2, 9),
    st.integers(1, 2),
)
def test_any_order_of_requests_aborts_and_stalls_gives_solo_outputs(
    events, pages, host_pages, depth
) -> None:
    engine, worker = make_engine(
        pages=pages, host_pages=host_pages, fetch=Store().fetch, depth=depth
    )
    names = [f"a{i}" for i in range(4)]
    know(engine, *names)
    asked: dict[str, str] = {}
    outputs: dict[str, list[int]] = {}
    for at, (event, number) in enumerate(events):
        if event == "ask":
            asked[str(at)] = ["", *names][number % 5]
            ask(engine, str(at), asked[str(at)], tokens=number // 5 + 1)
        elif event == "abort" and engine.requests:
            gone = sorted(engine.requests)[number % len(engine.requests)]
            engine.abort(gone)
            del asked[gone]
        elif event in ("stall", "go"):
            worker.stopped = event == "stall"
        take(outputs, engine.step())
        assert engine.check_integrity() == []
    worker.stopped = False
    deadline = time.monotonic() + 20
    while engine.requests:
        assert time.monotonic() < deadline, "a request waits for ever"
        take(outputs, engine.step())
    for request_id, name in asked.items():
        tokens = outputs[request_id]
        assert tokens == solo(name, PROMPT, SamplingParams(max_tokens=len(tokens), ignore_eos=True))
    settle(engine)
    assert engine.check_integrity() == []
    assert not any(engine.books.demand.is_wanted(a.handle) for a in engine.adapters.values())


def take(outputs: dict[str, list[int]], step: list[Output | Failed]) -> None:
    for output in step:
        assert isinstance(output, Output)
        outputs.setdefault(output.request_id, []).extend(output.tokens)
