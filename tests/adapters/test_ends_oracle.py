"""PEFT decides what an adapter makes of the embedding and the LM head, tied or not."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from sharding import TOP
from tests.helpers.tiny_models import load_oracle, make_checkpoint, make_peft_adapter
from tp_engine.adapters import AdapterRevision, read_adapter
from tp_engine.adapters.ends.base import BaseFiles
from tp_engine.adapters.ends.replaced import EMBEDDING, HEAD
from tp_engine.models.spec import ModelSpec

TOKENS = [9, 100, 17, 64, 63, 0, 127]
ENDS = ["q_proj", "embed_tokens", "lm_head"]
CASES: dict[str, dict[str, Any]] = {
    "head": {"targets": ["q_proj", "lm_head"]},
    "head_alone": {"targets": ["lm_head"], "r": 7, "rslora": True},
    "embedding": {"targets": ["embed_tokens"], "r": 5},
    "both": {"targets": ENDS, "rank_pattern": {"lm_head": 9}, "alpha_pattern": {"embed_tokens": 3}},
    "both_by_regex": {"targets": r".*(q_proj|embed_tokens|lm_head)"},
    "layers_leave_out_the_embedding": {"targets": ENDS, "layers": [1]},
    "excluded": {"targets": ENDS, "exclude_modules": ["lm_head"]},
    "embedding_that_ties": {"targets": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "head_that_ties": {"targets": ["q_proj", "lm_head"], "ensure_weight_tying": True},
    "scales_that_tie": {
        "targets": ["lm_head"],
        "ensure_weight_tying": True,
        "alpha_pattern": {"lm_head": 5.0},
        "rank_pattern": {"lm_head": 9},
    },
    "saved_head": {"targets": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved_by_an_ending": {"targets": ["q_proj"], "modules_to_save": ["head"]},
    "saved_embedding": {"targets": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "saved_both": {"targets": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved_head_that_ties": {
        "targets": ["q_proj"],
        "modules_to_save": ["lm_head"],
        "ensure_weight_tying": True,
    },
    "saved_both_that_tie": {
        "targets": ["q_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
        "ensure_weight_tying": True,
    },
    "saved_is_not_targeted": {"targets": ENDS, "modules_to_save": ["lm_head"]},
    "saved_nothing": {"targets": ["q_proj"], "modules_to_save": ["classifier"]},
    "rows": {"targets": ["q_proj"], "trainable_token_indices": TOKENS},
    "rows_of_the_head": {"targets": ["q_proj"], "trainable_token_indices": {"lm_head": TOKENS}},
    "equal_rows": {
        "targets": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS},
    },
    "other_order": {
        "targets": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": TOKENS, "lm_head": TOKENS[::-1]},
    },
    "rows_that_tie": {
        "targets": ["q_proj"],
        "trainable_token_indices": {"model.embed_tokens": TOKENS, "lm_head": TOKENS},
        "ensure_weight_tying": True,
    },
    "rows_under_a_head": {"targets": ["q_proj", "lm_head"], "trainable_token_indices": TOKENS},
    "equal_rows_under_a_tied_head": {
        "targets": ["embed_tokens"],
        "trainable_token_indices": {"lm_head": TOKENS},
    },
    "saved_beside_rows": {
        "targets": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "trainable_token_indices": {"lm_head": TOKENS},
    },
    "bfloat16": {"targets": ENDS, "dtype": torch.bfloat16},
}


@functools.cache
def base_of(root: Path, tied: bool) -> Path:
    path = root / f"tied-{tied}"
    return path if path.exists() else make_checkpoint(path, "llama", tie_word_embeddings=tied)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ends")


def pefts_ends(base: Path, adapter: Path) -> list[torch.Tensor]:
    """The embedding and the head [V, H] as PEFT applies the saved adapter."""
    model = copy.deepcopy(load_oracle(base))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(model, str(adapter)).float().get_base_model()
    with torch.inference_mode():
        embedding = model.get_input_embeddings()(torch.arange(model.config.vocab_size))
        head = model.get_output_embeddings()(torch.eye(model.config.hidden_size)).T
    return [embedding, head]


def our_ends(base: Path, revision: AdapterRevision) -> list[torch.Tensor]:
    """The same, from what was read."""
    model = load_oracle(base)
    ends = []
    for end, layer in enumerate((model.get_input_embeddings(), model.get_output_embeddings())):
        matrix = layer.weight.detach().clone()
        replaced, pair = revision.replaced.get(end), revision.modules.get((TOP, end))
        if replaced is not None and replaced.whole is not None:
            matrix = replaced.whole.float()
        if replaced is not None and replaced.ids is not None and replaced.rows is not None:
            matrix = matrix.index_copy(0, replaced.ids, replaced.rows.float())
        if pair is not None:
            delta = pair.scale * (pair.b.float() @ pair.a.float())
            matrix = matrix + (delta.T if end == EMBEDDING else delta)
        ends.append(matrix)
    return ends


def assert_same_ends(base: Path, adapter: Path) -> AdapterRevision:
    spec = ModelSpec.from_directory(base)
    files = BaseFiles(directory=base, tied=spec.tie_word_embeddings)
    revision = read_adapter(adapter, spec, base=files)
    for ours, pefts in zip(our_ends(base, revision), pefts_ends(base, adapter), strict=True):
        torch.testing.assert_close(ours, pefts, rtol=1e-5, atol=1e-5)
    assert revision.applied == revision.expected
    return revision


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_both_ends_equal_pefts(case: str, tied: bool, root: Path, tmp_path: Path) -> None:
    base = base_of(root, tied)
    adapter = make_peft_adapter(tmp_path, base, seed=1, **CASES[case])
    revision = assert_same_ends(base, adapter)
    changed = {end for top, end in revision.modules if top == TOP} | set(revision.replaced)
    assert bool(changed) == (case != "saved_nothing")


def saved_with_its_base(path: Path, base: Path, targets: list[str]) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(target_modules=targets, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.get_peft_model(model, config).save_pretrained(path, save_embedding_layers=True)
    return path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("targets", [["q_proj"], ENDS, ["embed_tokens"], ["lm_head"]])
def test_a_copy_of_the_base_takes_no_place_and_another_base_is_applied(
    targets: list[str], tied: bool, root: Path, tmp_path: Path
) -> None:
    """PEFT loads what was saved over the base's own; in a tied base that is one matrix."""
    base = base_of(root, tied)
    adapter = saved_with_its_base(tmp_path / "same", base, targets)
    assert assert_same_ends(base, adapter).replaced == {}
    assert read_adapter(adapter, ModelSpec.from_directory(base)).replaced  # base not known
    other = make_checkpoint(tmp_path / "other", "llama", seed=7, tie_word_embeddings=tied)
    adapter = saved_with_its_base(tmp_path / "adapter", other, targets)
    revision = assert_same_ends(base, adapter)
    assert revision.replaced
    if tied:
        assert revision.replaced[HEAD].whole is revision.replaced[EMBEDDING].whole
