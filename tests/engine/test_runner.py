"""What a rank does before its first step, and around each."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kernels import ops_for
from sharding import ModelDims
from tp_engine import rank as ranks
from tp_engine.steps import runner as runners
from tp_engine.steps.runner import Runner


def test_launches_are_renewed_once_in_a_period_and_before_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runners, "RENEWAL", 3)
    monkeypatch.setattr(runners, "HostStep", SimpleNamespace(of=lambda plan: plan))
    nothing = np.zeros(0, np.int64)
    plan: Any = SimpleNamespace(
        opens=nothing,
        page_updates=nothing,
        sequences=np.array([0, 1, 1, 1]),
        candidates=0,
        full_rows=nothing,
    )
    events: list[object] = []
    runner: Any = object.__new__(Runner)
    runner.forward_calls, runner._device = 0, torch.device("cpu")
    runner._renew = events.append
    runner._forward = lambda host: events.append("step")
    runner._sampler = SimpleNamespace(step=lambda *_, **__: None)
    for _ in range(7):
        runner.execute(plan)
    period = ["step", "step", torch.device("cpu"), "step"]
    assert events == [*period, *period, "step"]


def test_a_vocabulary_that_cannot_be_sampled_from_is_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("weights were read")

    few = replace(ops_for(torch.device("cpu")), most_columns=127)
    monkeypatch.setattr(ranks, "ops_for", lambda *_, **__: few)
    monkeypatch.setattr(ranks, "_load", load)
    dims = ModelDims(
        layers=1, hidden=64, intermediate=64, heads=2, kv_heads=1, head_dim=8, vocab=128
    )
    joined: Any = SimpleNamespace(
        config=SimpleNamespace(dtype="float32", deterministic=False),
        spec=SimpleNamespace(dims=lambda: dims),
        comm=SimpleNamespace(device=torch.device("cpu"), world=1, rank=0),
        directory=None,
    )
    with pytest.raises(ValueError, match=r"vocab_size=128 .* at most 127"):
        ranks.build_rank(joined)
