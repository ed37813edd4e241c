"""The loader with a real store and a rank that only says what it serves."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.helpers.tiny_models import make_checkpoint, make_peft_adapter
from tp_engine.adapters import AdapterImage, AdapterRegistry
from tp_engine.adapters.store import AdapterStore
from tp_engine.fleet import AdapterLoader, StartingAdapters
from tp_engine.models.spec import ModelSpec
from tp_engine.rank import Rank


class Loader(AdapterLoader):
    """Packs nothing but a page."""

    layout = "one"

    def pack(self, revision: object) -> Any:
        pages, record = torch.zeros((1, 16), dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
        return [AdapterImage(pages=pages, record=record)]


def loader_for(base_digest: str, model: Path, root: Path) -> tuple[Loader, AdapterStore]:
    store = AdapterStore(
        root, base_digest=base_digest, architecture="LlamaForCausalLM", vocab_size=128
    )
    config = SimpleNamespace(base_names=("base",), model="base")
    joined = SimpleNamespace(spec=ModelSpec.from_directory(model), directory=model)
    rank = SimpleNamespace(base_digest=base_digest, config=config, joined=joined)
    return Loader(cast(Rank, rank), store), store


def test_a_revision_of_another_base_earns_a_warning_with_both_digests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_checkpoint(tmp_path / "base", "llama")
    adapter = make_peft_adapter(tmp_path / "adapter", model)
    quantised, store = loader_for("digest-of-nf4", model, tmp_path / "store")
    revision, _ = quantised.load(adapter)
    quantised.record("x", revision.digest)
    assert quantised.load_kept("x", revision.digest)[0].warnings == revision.warnings
    store.close()
    plain, store = loader_for("digest-of-16-bit", model, tmp_path / "store")
    *others, warning = plain.load_kept("x", revision.digest)[0].warnings
    assert tuple(others) == revision.warnings
    registry = AdapterRegistry(["base"])
    with caplog.at_level(logging.WARNING):
        StartingAdapters(plain, 10).restore(registry)
    store.close()
    assert registry.adapters["x"].digest == revision.digest
    for text in (warning, caplog.text):
        assert "digest-of-nf4" in text and "digest-of-16-bit" in text
