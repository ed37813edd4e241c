"""The validator's pass over the Triton kernels: those that serve as many rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.dispatch import gpu_ops
from kernels.lora import decode
from launch.validation.batch import Batch
from launch.validation.forward import RecordingDecoder
from launch.validation.loading import load
from launch.validation.options import read_options
from tests.helpers.tiny_models import make_checkpoint, make_peft_adapter
from tp_engine.adapters import AdapterRevision
from tp_engine.rank import read_adapters
from tp_engine.ranks.join import join


def test_the_validator_runs_the_one_lora_launch_of_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)
    lora = [
        f"r{r}={make_peft_adapter(tmp_path / f'r{r}', model, r=r, alpha=8, seed=r)}"
        for r in (3, 20)
    ]
    joined = join(read_options(["--model", str(model), "--lora", *lora]).engine)
    adapters: dict[str, AdapterRevision] = {}
    read_adapters(joined, adapters.__setitem__)
    loaded = load(joined, adapters, Batch.of("base", adapters, vocab=128, positions=64))
    sequences = [[1, 2, 3, 4, 5], [9, 8, 7], [4, 4, 6, 2, 1, 3, 5, 7, 9, 11]]
    revisions = [None, *adapters.values()]
    truth = RecordingDecoder(loaded).run(sequences, revisions)
    launches: list[int] = []
    add = decode.add_

    def counted(y: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        launches.append(y.shape[0])
        add(y, *args, **kwargs)

    monkeypatch.setattr(decode, "add_", counted)
    monkeypatch.setattr("launch.validation.forward.ops_for", lambda *_, **__: gpu_ops())
    found = RecordingDecoder(loaded).run(sequences, revisions)
    assert launches == [18] * 4, "qkv, o, gate_up and down"
    assert truth.logits is not None and found.logits is not None
    torch.testing.assert_close(found.logits, truth.logits, rtol=1e-3, atol=1e-3)
