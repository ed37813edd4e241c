"""The whole engine over the Triton kernels, against transformers and PEFT."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from kernels.dispatch import gpu_ops
from tests.helpers.tiny_models import make_checkpoint, make_peft_adapter, oracle_greedy
from tp_engine import LLM, SamplingParams
from tp_engine.steps.graphs import StepGraphs
from tp_engine.steps.host_step import HostStep
from tp_engine.steps.runner import Runner
from tp_engine.steps.step import StepLogits

PROMPTS = ([1, 2, 3, 4, 5, 6, 7], list(range(1, 40)))


def graphs_of(runner: Runner) -> StepGraphs:
    return StepGraphs(
        runner._compute,
        max_num_seqs=runner._memory.tables.shape[0] - 1,
        max_model_len=64,
        max_rows=24,
        device=runner._device,
    )


def forward_padded(runner: Runner, host: HostStep) -> StepLogits:
    """A step as a captured one has it, but for the graph."""
    graphs = graphs_of(runner)
    key = graphs.key_of(host)
    assert key is not None
    padded = graphs.padded(host, key)
    return runner._compute(padded, padded.pack(pinned=False)).first(host.logit_rows.size)


@pytest.mark.parametrize(
    ("kind", "layers", "many_rows"), [("llama", 2, 1024), ("qwen3", 1, 1024), ("llama", 2, 8)]
)
def test_the_engine_over_triton_kernels_gives_the_oracles_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind, layers: int, many_rows: int
) -> None:
    for module in ("gpu", "gpu_silu"):  # with 8, prompts take the way of long ones
        monkeypatch.setattr(f"kernels.lora.{module}.MANY_ROWS", many_rows)
    monkeypatch.setattr("kernels.lora.beside.FORKED_ROWS", min(64, many_rows - 1))
    ops = dataclasses.replace(gpu_ops(), capturable=False)
    monkeypatch.setattr("tp_engine.rank.ops_for", lambda device, *, deterministic=False: ops)
    model = make_checkpoint(tmp_path / "model", kind, num_hidden_layers=layers)
    adapters = {
        name: make_peft_adapter(tmp_path / name, model, r=rank, alpha=8, seed=rank)
        for name, rank in (("narrow", 3), ("wide", 20))
    }
    llm = LLM(str(model), lora={name: str(path) for name, path in adapters.items()}, num_pages=96)
    short, long = PROMPTS
    asked = [(long, None), (short, "narrow"), (short, "wide"), (long, "wide"), (short, None)]
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    answers = llm.generate([p for p, _ in asked], params, model=[name for _, name in asked])
    assert answers is not None
    for (prompt, name), answer in zip(asked, answers, strict=True):
        wanted = oracle_greedy(model, prompt, 3, adapter=adapters.get(name or ""))
        assert answer.tokens == list(wanted), (name, len(prompt))


def test_padded_steps_give_the_oracles_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside decode rows, with an adapter and without; what is launched before
    them, steps of nothing but padding, leaves no trace."""
    for module in ("gpu", "gpu_silu"):
        monkeypatch.setattr(f"kernels.lora.{module}.MANY_ROWS", 24)
    monkeypatch.setattr(Runner, "_forward", forward_padded)
    ops = dataclasses.replace(gpu_ops(), capturable=False)
    monkeypatch.setattr("tp_engine.rank.ops_for", lambda device, *, deterministic=False: ops)
    model = make_checkpoint(tmp_path / "model", "llama")
    adapter = make_peft_adapter(tmp_path / "adapter", model, r=3, alpha=8, seed=3)
    llm = LLM(
        str(model),
        lora={"adapter": str(adapter)},
        num_pages=96,
        max_num_seqs=4,
        max_num_batched_tokens=24,
    )
    runner = llm.rank.worker.runner
    before = runner.arena.memory.clone()
    for key in graphs_of(runner)._longer(max_rank=3):
        empty = graphs_of(runner).padded(HostStep.empty(), key)
        assert runner._compute(empty, empty.pack(pinned=False)).best.shape[0] == key.shape.logits
    assert torch.equal(runner.arena.memory, before)
    assert (runner._memory.last_token[:-1] == -1).all()
    asked = [(list(range(1, 15)), None), (list(range(3, 20)), "adapter"), ([9, 8, 7], "adapter")]
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    answers = llm.generate([p for p, _ in asked], params, model=[name for _, name in asked])
    assert answers is not None
    for (prompt, name), answer in zip(asked, answers, strict=True):
        wanted = oracle_greedy(model, prompt, 2, adapter=adapter if name else None)
        assert answer.tokens == list(wanted), (name, len(prompt))
