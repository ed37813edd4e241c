"""Adapters of the embedding and the LM head that are refused, each by the name of what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sharding import ModelDims
from tests.adapters.writing import PREFIX, plain_config, plain_tensors, write_adapter
from tests.helpers.tiny_models import make_checkpoint
from tp_engine.adapters import AdapterError, digest_of, read_adapter
from tp_engine.adapters.ends.replaced import Replaced
from tp_engine.models.spec import ModelSpec

V, H, R = 128, 64, 4
Q = ["q_proj"]
EMBED, HEAD = f"{PREFIX}model.embed_tokens", f"{PREFIX}lm_head"
ROWS = "token_adapter.trainable_tokens_delta"
TIE = {"ensure_weight_tying": True}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HEAD_PAIR = {f"{HEAD}.lora_A.weight": numbers(R, H), f"{HEAD}.lora_B.weight": numbers(V, R)}
EMBED_PAIR = {
    f"{EMBED}.lora_embedding_A": numbers(R, V),
    f"{EMBED}.lora_embedding_B": numbers(H, R),
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("tied") / "base"
    return ModelSpec.from_directory(make_checkpoint(path, "llama", tie_word_embeddings=True))


def refusal(
    path: Path, spec: ModelSpec, fields: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> AdapterError:
    """The error for an adapter of all sites and these tensors."""
    every = plain_tensors(spec.dims()) | tensors
    with pytest.raises(AdapterError) as caught:
        read_adapter(write_adapter(path, plain_config() | fields, every), spec)
    return caught.value


SITES = plain_config()["target_modules"]
Refused = tuple[dict[str, Any], dict[str, torch.Tensor], str, tuple[str, ...]]
REFUSED: dict[str, Refused] = {
    "another_vocabulary_saved": (
        {"modules_to_save": ["lm_head"]},
        {f"{HEAD}.weight": numbers(V + 2, H)},
        "shape_mismatch",
        (f"{HEAD}.weight", "[130, 64]", "vocabulary of 128"),
    ),
    "another_vocabulary_of_a_base": (
        {},
        {f"{EMBED}.base_layer.weight": numbers(V - 1, H)},
        "shape_mismatch",
        ("[127, 64]", "vocabulary of 128"),
    ),
    "another_vocabulary_of_a_pair": (
        {"target_modules": [*SITES, "lm_head"]},
        HEAD_PAIR | {f"{HEAD}.lora_B.weight": numbers(V + 1, R)},
        "shape_mismatch",
        (f"{HEAD}.lora_B.weight", "[129, 4]", "[128, 4]"),
    ),
    "another_rank": (
        {"target_modules": [*SITES, "embed_tokens"], "rank_pattern": {"embed_tokens": 5}},
        EMBED_PAIR,
        "shape_mismatch",
        ("rank 5", "[4, 128]", "[5, 128]"),
    ),
    "transposed_embedding": (
        {"target_modules": [*SITES, "embed_tokens"]},
        EMBED_PAIR | {f"{EMBED}.lora_embedding_A": numbers(V, R)},
        "shape_mismatch",
        ("[128, 4]", "[4, 128]"),
    ),
    "emptied_by_zero3": (
        {"modules_to_save": ["lm_head"]},
        {f"{HEAD}.weight": numbers(0)},
        "shape_mismatch",
        ("ZeRO-3",),
    ),
    "other_number_of_rows": (
        {"trainable_token_indices": [3, 4]},
        {f"{EMBED}.{ROWS}": numbers(3, H)},
        "shape_mismatch",
        ("2 tokens", "[3, 64]", "[2, 64]"),
    ),
    "token_beyond_the_vocabulary": (
        {"trainable_token_indices": [3, V]},
        {f"{EMBED}.{ROWS}": numbers(2, H)},
        "config_invalid",
        ("trainable_token_indices", "128"),
    ),
    "rows_without_indices": (
        {},
        {f"{EMBED}.{ROWS}": numbers(2, H)},
        "tensor_unknown",
        (ROWS, "does not ask"),
    ),
    "rows_of_the_other_end": (
        {"trainable_token_indices": {"lm_head": [1, 2]}},
        {f"{EMBED}.{ROWS}": numbers(2, H)},
        "tensor_unknown",
        (EMBED,),
    ),
    "indices_without_rows": (
        {"trainable_token_indices": [1]},
        {},
        "tensor_missing",
        ("model.embed_tokens", "trainable_tokens_delta"),
    ),
    "saved_without_weight": (
        {"modules_to_save": ["lm_head"]},
        {},
        "tensor_missing",
        ("lm_head", "modules_to_save"),
    ),
    "targeted_without_pair": (
        {"target_modules": [*SITES, "lm_head"]},
        {},
        "tensor_missing",
        ("lm_head", "LoRA"),
    ),
    "half_a_pair": (
        {"target_modules": [*SITES, "lm_head"]},
        {f"{HEAD}.lora_A.weight": numbers(R, H)},
        "tensor_missing",
        ("lm_head", "the B"),
    ),
    "pair_not_targeted": ({}, HEAD_PAIR, "tensor_unknown", (f"{HEAD}.lora_A",)),
    "linear_pair_of_the_embedding": (
        {"target_modules": [*SITES, "embed_tokens"]},
        {f"{EMBED}.lora_A.weight": numbers(R, V), f"{EMBED}.lora_B.weight": numbers(H, R)},
        "tensor_unsupported",
        (f"{EMBED}.lora_A.weight",),
    ),
    "dora_of_the_head": (
        {"target_modules": [*SITES, "lm_head"]},
        HEAD_PAIR | {f"{HEAD}.lora_magnitude_vector": numbers(V)},
        "tensor_unsupported",
        ("lora_magnitude_vector", "DoRA"),
    ),
    "bias_of_the_head": (
        {"target_modules": [*SITES, "lm_head"]},
        HEAD_PAIR | {f"{HEAD}.lora_B.bias": numbers(V)},
        "tensor_unsupported",
        ("lora_B.bias", "lora_bias"),
    ),
    "two_names_for_one": (
        {"modules_to_save": ["lm_head"]},
        {f"{HEAD}.weight": numbers(V, H), f"{HEAD}._orig_mod.weight": numbers(V, H)},
        "tensor_unknown",
        (f"{HEAD}.weight", f"{HEAD}._orig_mod.weight"),
    ),
    "two_bases": (
        {},
        {f"{HEAD}.weight": numbers(V, H), f"{HEAD}.base_layer.weight": numbers(V, H)},
        "tensor_unknown",
        ("base_layer.weight",),
    ),
    "not_finite": (
        {"modules_to_save": ["lm_head"]},
        {f"{HEAD}.weight": numbers(V, H).log()},
        "not_finite",
        (f"{HEAD}.weight",),
    ),
    "integers": (
        {"modules_to_save": ["lm_head"]},
        {f"{HEAD}.weight": torch.zeros(V, H, dtype=torch.int8)},
        "dtype_unsupported",
        ("int8",),
    ),
    "another_saved_module": (
        {"modules_to_save": ["norm"]},
        {f"{PREFIX}model.norm.weight": numbers(H)},
        "tensor_unsupported",
        ("model.norm.weight", "modules_to_save"),
    ),
    "saved_and_targeted": (
        {"modules_to_save": ["head"], "target_modules": [*SITES, "lm_head"]},
        HEAD_PAIR,
        "config_unsupported",
        ("modules_to_save", "target_modules", "lm_head"),
    ),
    "rows_of_a_saved_module": (
        {"modules_to_save": ["embed_tokens"], "trainable_token_indices": [1]},
        {},
        "config_unsupported",
        ("trainable_token_indices", "modules_to_save", "model.embed_tokens"),
    ),
    "rows_of_a_targeted_module": (
        {"target_modules": [*SITES, "embed_tokens"], "trainable_token_indices": [1]},
        EMBED_PAIR,
        "config_unsupported",
        ("trainable_token_indices", "target_modules", "model.embed_tokens"),
    ),
}

TIED: dict[str, Refused] = {
    "rows_under_a_saved_head": (
        {"modules_to_save": ["lm_head"], "trainable_token_indices": [1]},
        {},
        "config_unsupported",
        ("trainable_token_indices", "modules_to_save", "lm_head"),
    ),
    "other_rows_that_tie": (
        {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [2, 1]}} | TIE,
        {},
        "config_invalid",
        ("trainable_token_indices", "ensure_weight_tying"),
    ),
    "rows_that_the_embedding_has": (
        {"trainable_token_indices": [1]},
        {f"{EMBED}.{ROWS}": numbers(1, H), f"{HEAD}.{ROWS}": numbers(1, H)},
        "tensor_unknown",
        (f"{HEAD}.{ROWS}",),
    ),
    "saved_that_tie_but_differ": (
        {"modules_to_save": ["embed_tokens"]} | TIE,
        {f"{EMBED}.weight": numbers(V, H), f"{HEAD}.weight": numbers(V, H, seed=1)},
        "tensor_unsupported",
        (f"{EMBED}.weight", f"{HEAD}.weight", "ensure_weight_tying"),
    ),
    "pairs_that_tie_but_differ": (
        {"target_modules": [*SITES, "embed_tokens"]} | TIE,
        EMBED_PAIR | HEAD_PAIR,
        "tensor_unsupported",
        ("lora_embedding_A", f"{HEAD}.lora_A", "ensure_weight_tying"),
    ),
    "bases_that_differ": (
        {},
        {f"{EMBED}.weight": numbers(V, H), f"{HEAD}.weight": numbers(V, H, seed=1)},
        "tensor_unsupported",
        (f"{EMBED}.weight", f"{HEAD}.weight", "one matrix"),
    ),
    "targeted_beside_a_saved_one_that_ties": (
        {"modules_to_save": ["embed_tokens"], "target_modules": [*SITES, "lm_head"]} | TIE,
        HEAD_PAIR,
        "config_unsupported",
        ("modules_to_save", "lm_head"),
    ),
}


def check(path: Path, spec: ModelSpec, case: Refused) -> None:
    fields, tensors, code, parts = case
    error = refusal(path, spec, fields, tensors)
    assert error.code == code
    assert all(part in str(error) for part in parts), str(error)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, spec: ModelSpec, tmp_path: Path) -> None:
    check(tmp_path, spec, REFUSED[case])


@pytest.mark.parametrize("case", TIED)
def test_refused_by_name_for_a_tied_base(case: str, tied: ModelSpec, tmp_path: Path) -> None:
    check(tmp_path, tied, TIED[case])


def test_without_target_modules_the_tensors_decide(spec: ModelSpec, tmp_path: Path) -> None:
    config = plain_config(target_modules=None)
    revision = read_adapter(write_adapter(tmp_path, config, HEAD_PAIR | EMBED_PAIR), spec)
    assert [*revision.modules] == [(-1, 0), (-1, 1)] and revision.max_rank == R


def test_other_writers_names_are_understood(spec: ModelSpec, tmp_path: Path) -> None:
    config = plain_config(target_modules=["embed_tokens", "lm_head"])
    renamed = {
        f"{PREFIX}_orig_mod.model.embed_tokens.lora_embedding_A.default": numbers(R, V),
        f"{EMBED}.lora_embedding_B.default": numbers(H, R),
        f"{HEAD}.lora_A.default.weight": numbers(R, H),
        f"{HEAD}.lora_B.default.weight": numbers(V, R),
    }
    read = [
        read_adapter(write_adapter(tmp_path / str(i), config, tensors), spec).digest
        for i, tensors in enumerate((HEAD_PAIR | EMBED_PAIR, renamed))
    ]
    assert read[0] == read[1]


def test_idle_entries_earn_a_warning(dims: ModelDims, spec: ModelSpec, tmp_path: Path) -> None:
    config = plain_config(modules_to_save=["score"])
    adapter = write_adapter(tmp_path, config, plain_tensors(dims))
    (warning,) = read_adapter(adapter, spec).warnings
    assert "modules_to_save" in warning and "'score'" in warning


def test_a_digest_covers_what_is_replaced() -> None:
    ids, rows = torch.tensor([1, 2]), numbers(2, H)
    changes = [
        {},
        {0: Replaced(whole=rows)},
        {1: Replaced(whole=rows)},
        {0: Replaced(ids=ids, rows=rows)},
        {0: Replaced(ids=ids + 1, rows=rows)},
        {0: Replaced(ids=ids, rows=rows + 1)},
        {0: Replaced(ids=ids, rows=rows), 1: Replaced(ids=ids, rows=rows)},
    ]
    assert len({digest_of({}, change) for change in changes}) == len(changes)


@pytest.mark.parametrize("field", ["use_dora", "lora_bias"])
@pytest.mark.parametrize("pair", [EMBED_PAIR, HEAD_PAIR], ids=["embedding", "head"])
def test_gains_and_biases_of_the_ends_are_refused_even_without_their_tensors(
    field: str, pair: dict[str, torch.Tensor], spec: ModelSpec, tmp_path: Path
) -> None:
    config = plain_config(target_modules=None, **{field: True})
    with pytest.raises(AdapterError, match=f"{field}=True: false where there is LoRA on") as caught:
        read_adapter(write_adapter(tmp_path, config, pair), spec)
    assert caught.value.code == "config_unsupported"
