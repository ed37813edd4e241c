"""What a process that serves asks of Python itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from sharding import cut_model
from tests.adapters.writing import (
    every_site,
    plain_config,
    random_modules,
    tensors_of,
    write_adapter,
)
from tests.helpers.tiny_models import make_checkpoint
from tp_engine import interpreter
from tp_engine.adapters import pack_adapter, read_adapter
from tp_engine.adapters.record import gain_places
from tp_engine.interpreter import freeze_objects
from tp_engine.models.spec import ModelSpec


def test_what_exists_is_not_looked_at_again() -> None:
    before = gc.get_freeze_count()
    made = [[] for _ in range(1000)]
    freeze_objects()
    try:
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()


LETS_OTHERS_RUN = {"sleep", "preadv", "update", "copy_"}
"""Names of calls that do."""


def longest_stretch(work: Callable[[], object]) -> int:
    """The most calls that a thread makes, at its work, without one that lets others run."""
    longest = stretch = 0

    def count(frame: FrameType, event: str, what: Any) -> None:
        nonlocal longest, stretch
        if event == "c_call" and what.__name__ in LETS_OTHERS_RUN:
            stretch = 0
        elif event in ("call", "c_call"):
            stretch += 1
        longest = max(longest, stretch)

    def watched() -> None:
        sys.setprofile(count)
        try:
            work()
        finally:
            sys.setprofile(None)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(watched).result()
    return longest


def test_no_loop_over_the_tensors_of_an_adapter_keeps_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interpreter, "BURST_SECONDS", -1.0)
    monkeypatch.setattr(interpreter, "PAUSE_SECONDS", 0.0)
    base = make_checkpoint(tmp_path / "base", "llama")
    spec = replace(ModelSpec.from_directory(base), num_layers=40)
    dims = spec.dims()
    modules = random_modules(dims, every_site(dims), seed=0)
    adapter = write_adapter(tmp_path / "adapter", plain_config(), tensors_of(modules))

    def bring() -> None:
        revision = read_adapter(adapter, spec)
        (image,) = pack_adapter(revision, cut_model(dims, 1), dims, torch.float32, 1 << 16)
        gain_places(image.record, dims.layers)

    assert longest_stretch(bring) < 10 * len(modules), "a loop makes more calls a module"
