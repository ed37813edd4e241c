"""The load generator's own logic: arrivals, adapter choice, reading of streams, figures, checks."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.bench.load.answer import Answer, Received, read_answer
from launch.bench.load.figures import by_tenant, faults, figures, percentile
from launch.bench.load.solo import Solo, disagreements, first_difference, sample
from launch.bench.load.workload import Request, Workload, arrivals, choose, power_law
from launch.bench.serve import parse, span, warm_requests

PLAIN = Workload(
    requests=40, models=("a", "b", "c"), popularity="turns", alpha=0.3, prompt_tokens=(3, 9),
    output_tokens=(2, 5), vocab=300, tenants=2, rate=None, cv=1.0, seed=1,
)  # fmt: skip


# -- workload -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_coefficient_of_variation(cv: float) -> None:
    times = arrivals(40_000, 5.0, cv, random.Random(2))
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gaps) / mean == pytest.approx(cv, rel=0.1)
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("alpha", "first", "ten"), [(0.1, 58.9, 74), (0.3, 20.4, 41), (0.6, 4.2, 17), (1, 0.5, 5)]
)
def test_the_power_law_gives_the_published_shares(alpha: float, first: float, ten: float) -> None:
    shares = power_law(200, alpha)
    assert sum(shares) == pytest.approx(1)
    assert 100 * shares[0] == pytest.approx(first, abs=0.05)
    assert 100 * sum(shares[:10]) == pytest.approx(ten, abs=0.5)


def test_models_are_chosen_as_asked() -> None:
    names = [f"m{i}" for i in range(10)]
    turns = choose(names, 25, "turns", 0.3, random.Random(0))
    assert turns == [*names, *names, *names[:5]]
    even = Counter(choose(names, 20_000, "uniform", 0.3, random.Random(0)))
    assert max(even.values()) < 1.15 * min(even.values())
    power = Counter(choose(names, 20_000, "power", 0.3, random.Random(0)))
    assert power["m0"] / 20_000 == pytest.approx((1 / 10) ** 0.3, abs=0.02)


def test_a_workload_is_the_same_every_time_and_within_its_bounds() -> None:
    requests = PLAIN.draw()
    assert requests == PLAIN.draw() and requests != replace(PLAIN, seed=2).draw()
    assert {len(r.prompt) for r in requests} == set(range(3, 10))
    assert {r.tokens for r in requests} == {2, 3, 4, 5}
    assert all(256 <= token < 300 for r in requests for token in r.prompt)
    assert [r.tenant for r in requests[:4]] == [0, 1, 0, 1]
    assert {r.at for r in requests} == {0.0}
    assert len({r.at for r in replace(PLAIN, rate=2.0).draw()}) == 40


@pytest.mark.parametrize(
    "fields",
    [{"alpha": 0}, {"cv": 0}, {"rate": 0.0}, {"models": ()}, {"popularity": "best"}, {"vocab": 256},
     {"requests": 0}, {"output_tokens": (5, 4)}, {"prompt_tokens": (0, 4)}],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        replace(PLAIN, **fields)


# -- answers ------------------------------------------------------------------------------------


def chunk(text: str) -> bytes:
    data = text.encode()
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def stream(texts: list[str], tokens: int, *, done: bool = True) -> bytes:
    body = "".join(f'data: {{"choices":[{{"text":"{t}"}}],"usage":null}}\n\n|' for t in texts)
    parts = [chunk(part) for part in body.split("|") if part]
    parts.append(chunk(f'data: {{"choices":[],"usage":{{"completion_tokens":{tokens}}}}}\n\n'))
    parts += [chunk("data: [DONE]\n\n")] if done else []
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    return head + b"".join(parts) + b"0\r\n\r\n"


@given(cuts=st.lists(st.integers(1, 300), max_size=8), texts=st.lists(st.just(" w"), min_size=1))
def test_a_stream_reads_the_same_however_it_is_cut(cuts: list[int], texts: list[str]) -> None:
    data = stream(texts, len(texts))
    bounds = [0, *sorted({cut for cut in cuts if cut < len(data)}), len(data)]
    parts = [(float(n), data[a:b]) for n, (a, b) in enumerate(pairwise(bounds))]
    answer = read_answer(Received(index=3, sent=-1.0, parts=parts))
    assert (answer.error, answer.index, answer.tokens) == (None, 3, len(texts))
    assert answer.text == "".join(texts) and len(answer.events) == len(texts)
    assert answer.ended == len(bounds) - 2
    for number, moment in enumerate(answer.events):
        end = data.find(b"\n\n\r\n", 0)
        for _ in range(number):
            end = data.find(b"\n\n\r\n", end + 1)
        assert bounds[int(moment)] < end + 2 <= bounds[int(moment) + 1]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (stream([" a"], 1, done=False), "broke off"),
        (stream([" a"], 1)[:120], "broke off"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}", "503"),
        (stream([" a"], 1).replace(b'"usage":{', b'"other":{'), "no token counts"),
        (stream([], 1), "empty"),
        (b"", "broke off|''"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(data: bytes, error: str) -> None:
    import re

    answer = read_answer(Received(index=0, sent=0.0, parts=[(1.0, data)]))
    assert answer.error is not None and re.search(error, answer.error), answer.error


def test_an_error_event_is_an_error() -> None:
    body = chunk('data: {"error":{"message":"lost"}}\n\n') + chunk("data: [DONE]\n\n")
    data = b"HTTP/1.1 200 OK\r\n\r\n" + body + b"0\r\n\r\n"
    answer = read_answer(Received(index=0, parts=[(1.0, data)]))
    assert answer.error is not None and "lost" in answer.error


# -- figures ------------------------------------------------------------------------------------


def answer_of(index: int, sent: float, events: list[float], **fields: Any) -> Answer:
    given = {"index": index, "sent": sent, "ended": events[-1], "events": events, "text": "",
             "tokens": len(events), "error": None} | fields  # fmt: skip
    return Answer(**given)


def request_of(index: int, tokens: int, tenant: int = 0) -> Request:
    return Request(index=index, at=0.0, model="m", prompt=[300], tokens=tokens, tenant=tenant)


def test_percentiles_are_linear_between_neighbours() -> None:
    assert percentile([4, 1, 2, 3], 50) == 2.5
    assert percentile([1], 99) == 1
    assert percentile(list(range(101)), 90) == 90
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)


def test_figures_of_two_answers() -> None:
    answers = [answer_of(0, 0.0, [1.0, 2.0, 4.0]), answer_of(1, 1.0, [2.0])]
    found = figures(answers)
    assert found["tokens"] == 4 and found["tokens_per_s"] == 1.0 and found["requests_per_s"] == 0.5
    assert found["ttft_ms"]["p50"] == 1000 and found["e2e_ms"]["mean"] == 2500
    assert found["tpot_ms"] == dict.fromkeys(("mean", "p50", "p90", "p99"), 1500)
    assert found["itl_ms"]["p50"] == 1500 and found["events_per_token"] == 1


def test_figures_by_tenant_are_of_its_requests_alone() -> None:
    requests = [request_of(0, 1, tenant=1), request_of(1, 2)]
    answers = [answer_of(0, 0.0, [1.0]), answer_of(1, 0.0, [2.0, 4.0])]
    found = by_tenant(requests, answers)
    assert {name: each["tokens_per_s"] for name, each in found.items()} == {
        "tenant-0": 0.5,
        "tenant-1": 1.0,
    }


def test_faults_are_errors_and_wrong_token_counts() -> None:
    requests = [request_of(0, 1), request_of(1, 2), request_of(2, 1), request_of(3, 1)]
    answers = [
        answer_of(0, 0.0, [1.0]),
        answer_of(1, 0.0, [1.0]),
        answer_of(2, 0.0, [1.0], error="503"),
        answer_of(3, 0.0, [1.0, 2.0], tokens=1),
    ]
    assert [fault.split(":")[0] for fault in faults(requests, answers)] == [
        "request 1",
        "request 2",
        "request 3",
    ]
    assert faults(requests[:1], answers[:1]) == []


# -- comparison with the request alone ----------------------------------------------------------


SOLO = Solo(text="ab cd ef", offsets=[0, 2, 5], gaps=[1.0, 0.01, 1.0])


def test_the_token_of_the_first_difference_is_found() -> None:
    assert first_difference(SOLO, "ab cd ef gh") is None
    assert first_difference(SOLO, "ab cd xx") is None, "the last token may be cut"
    assert first_difference(SOLO, "ab cx ef") == 1
    assert first_difference(SOLO, "xb cd ef") == 0
    assert first_difference(SOLO, "ab") == 1


def test_only_near_ties_may_differ() -> None:
    request = request_of(0, 3)
    tied = [answer_of(0, 0.0, [1.0], text="ab xx yy")]
    assert disagreements([(request, SOLO)], tied, near_tie=0.1) == []
    assert "token 1" in disagreements([(request, SOLO)], tied, near_tie=0.001)[0]
    wrong = [answer_of(0, 0.0, [1.0], text="zz cd ef")]
    assert "1.000 ahead" in disagreements([(request, SOLO)], wrong, near_tie=0.1)[0]


def test_samples_are_spread_and_short() -> None:
    requests = [request_of(i, 100) for i in range(40)]
    chosen = sample(requests, 4, 32)
    assert [(r.index, r.tokens) for r in chosen] == [(0, 32), (10, 32), (20, 32), (30, 32)]
    assert sample(requests, 0, 32) == []


# -- command line -------------------------------------------------------------------------------


def test_what_follows_two_dashes_is_the_servers() -> None:
    arguments, options = parse(["--start", "--streams", "3", "--", "--quantize", "nf4"])
    assert (arguments.streams, options) == (3, ["--quantize", "nf4"])
    assert span("8,512") == (8, 512) and span("7") == (7, 7)
    with pytest.raises(SystemExit):
        parse(["--url", "http://x", "--offline"])


def test_warm_requests_share_no_prompt_with_the_run() -> None:
    requests = PLAIN.draw()
    warm = warm_requests(requests, 4)
    assert len(warm) == 8 and {r.at for r in warm} == {0.0}
    assert not {tuple(r.prompt) for r in warm} & {tuple(r.prompt) for r in requests}
