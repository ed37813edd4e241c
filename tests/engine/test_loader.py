"""The loader with a real store and a rank that only says what it serves."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.engine.fake import make_engine
from tests.helpers.tiny_models import make_checkpoint, make_peft_adapter
from tp_engine.adapters import AdapterError, AdapterImage, AdapterRegistry, AdapterRevision
from tp_engine.adapters.errors import OutOfMemory
from tp_engine.adapters.store import AdapterStore, StoreError
from tp_engine.fleet import AdapterLoader, StartingAdapters
from tp_engine.models.spec import ModelSpec
from tp_engine.rank import Rank


class Loader(AdapterLoader):
    """Packs nothing but a page."""

    @property
    def layout(self) -> str:
        return self._rank.base_digest

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
    assert quantised.load_kept(revision.digest)[0].warnings == revision.warnings
    store.close()
    plain, store = loader_for("digest-of-16-bit", model, tmp_path / "store")
    *others, warning = plain.load_kept(revision.digest)[0].warnings
    assert tuple(others) == revision.warnings
    registry = AdapterRegistry(["base"])
    with caplog.at_level(logging.WARNING):
        StartingAdapters(plain, 10).restore(registry)
    store.close()
    assert registry.adapters["x"].digest == revision.digest
    for text in (warning, caplog.text):
        assert "digest-of-nf4" in text and "digest-of-16-bit" in text


class Unread(Loader):
    """Reads nothing."""

    def read(self, directory: Path) -> Any:
        raise AssertionError(f"{directory} is read")


def test_a_start_reads_only_what_was_not_served_so_before(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "base", "llama")
    first, store = loader_for("base", model, tmp_path / "store")
    digests = {}
    for seed, name in enumerate("xyz"):
        adapter = make_peft_adapter(tmp_path / name, model, seed=seed)
        revision, _ = first.load(adapter)
        first.record(name, revision.digest)
        digests[name] = revision.digest
    store.close()
    rank = first._rank
    store = AdapterStore(
        tmp_path / "store",
        base_digest="base",
        architecture="LlamaForCausalLM",
        vocab_size=128,
    )
    store.pin("y", True)
    engine, _ = make_engine()
    registry = AdapterRegistry(["base"])
    starting = StartingAdapters(Unread(rank, store), 100)
    assert starting.restore(registry) == {"y"}
    starting.hand_out(engine, registry, "fail")
    assert {name: card.digest for name, card in registry.adapters.items()} == digests
    assert set(engine.adapters) == set(digests.values())
    assert engine.tiers.host.warm == 0
    assert registry.adapters["x"].applied == revision.applied

    otherwise = Unread(rank, store)
    otherwise._rank = cast(Rank, SimpleNamespace(base_digest="another"))
    with pytest.raises(AssertionError, match="is read"):
        StartingAdapters(otherwise, 100).restore(AdapterRegistry(["base"]))
    store.close()


def test_a_revision_whose_files_changed_is_not_fetched(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "base", "llama")
    loader, store = loader_for("base", model, tmp_path / "store")
    kept, other = (
        loader.load(make_peft_adapter(tmp_path / name, model, seed=seed))[0].digest
        for seed, name in enumerate("xy")
    )
    assert len(loader.fetch(kept)) == 1
    target, source = (store.directory(digest) for digest in (kept, other))
    weights = "adapter_model.safetensors"
    (target / weights).write_bytes((source / weights).read_bytes())
    with pytest.raises(StoreError, match="SHA-256") as error:
        loader.fetch(kept)
    assert error.value.code == "damaged"
    assert len(loader.fetch(other)) == 1
    store.close()


def test_a_name_that_the_base_has_now_is_left_out_of_a_start(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "base", "llama")
    loader, store = loader_for("digest", model, tmp_path / "store")
    revision, _ = loader.load(make_peft_adapter(tmp_path / "adapter", model))
    for name in ("x", "x:y", "z"):
        loader.record(name, revision.digest)
    registry = AdapterRegistry(["x"])
    StartingAdapters(loader, 10).restore(registry)
    store.close()
    assert [*registry.adapters] == ["z"]
    reasons = {name: each.reason for name, each in loader.left_out.items()}
    assert [*reasons] == ["x", "x:y"] and "is a name of the base model" in reasons["x"]


def test_whatever_files_provoke_is_a_refusal_with_a_trace_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("division by zero")

    model = make_checkpoint(tmp_path / "base", "llama")
    loader, store = loader_for("digest", model, tmp_path / "store")
    monkeypatch.setattr("tp_engine.fleet.loader.read_adapter", read)
    with pytest.raises(AdapterError, match="ZeroDivisionError: division by zero") as refused:
        loader.load(make_peft_adapter(tmp_path / "adapter", model))
    assert refused.value.code == "unreadable" and "Traceback" in caplog.text
    assert store.revisions() == []
    store.close()


def test_whatever_packing_provokes_is_a_refusal_too(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config, layout = SimpleNamespace(dtype="float32"), SimpleNamespace(page_bytes=16)
    rank = SimpleNamespace(config=config, layout=layout, cuts=(), dims=None)
    loader, revision = AdapterLoader(cast(Rank, rank), None), SimpleNamespace(source="/srv/x")

    def pack(error: Exception) -> None:
        def packs(*arguments: object) -> None:
            raise error

        monkeypatch.setattr("tp_engine.fleet.loader.pack_adapter", packs)
        loader.pack(cast(AdapterRevision, revision))

    with pytest.raises(AdapterError, match="/srv/x: AssertionError: more rows") as refused:
        pack(AssertionError("more rows"))
    assert refused.value.code == "unreadable" and "Traceback" in caplog.text
    with pytest.raises(ValueError, match=r"^too long$"):
        pack(ValueError("too long"))
    with pytest.raises(OutOfMemory):
        pack(MemoryError())
