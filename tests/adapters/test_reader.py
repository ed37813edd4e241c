"""Faults that people met with adapters, each refused when the adapter is loaded.

Belong to the engine or the server and are tested there: an unknown adapter answered by the base
(the registry's part is in `test_registry`), a load that re-routes a running request, an evicted
place that keeps old weights, base rows that get an adapter, reload that hits old KV, a prompt
cache across adapters, more adapters than places, unload while running, concurrent loads, adapters
that rotate under tensor parallelism, mixed ranks in one batch, a base digest that differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sharding import ModelDims
from tests.adapters.writing import (
    PREFIX,
    every_site,
    name_of,
    plain_config,
    plain_tensors,
    random_modules,
    renamed,
    tensors_of,
    write_adapter,
)
from tp_engine.adapters import AdapterError, read_adapter
from tp_engine.models.spec import ModelSpec

Q0A = name_of(0, "q_proj", "A")
Q0B = name_of(0, "q_proj", "B")


def refusal(path: Path, spec: ModelSpec, code: str) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(path, spec)
    assert caught.value.code == code, caught.value
    return str(caught.value)


def test_a_good_adapter_reports_all_modules(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = plain_tensors(dims)
    revision = read_adapter(write_adapter(tmp_path, plain_config(), tensors), spec)
    assert (revision.applied, revision.expected, revision.max_rank) == (14, 14, 4)
    assert revision.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert torch.equal(revision.modules[0, 0].a, tensors[Q0A])
    assert torch.equal(revision.modules[0, 0].b, tensors[Q0B])
    assert {module.scale for module in revision.modules.values()} == {2.0}
    assert revision.warnings == ()


EXTRA: dict[str, tuple[str, str]] = {
    "bias_of_a": (f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.bias", "lora_A"),
    "magnitude_of_another_adapter": (
        f"{PREFIX}model.layers.0.self_attn.q_proj.lora_magnitude_vector.mine",
        "'default'",
    ),
    "base_bias": (f"{PREFIX}model.layers.0.self_attn.q_proj.bias", "biases"),
    "modules_to_save": (f"{PREFIX}model.norm.weight", "modules_to_save"),
    "embedding_elsewhere": (
        "base_model.model.embed_tokens.lora_embedding_A",
        f"looked for under {PREFIX}model.embed_tokens and",
    ),
    "head_elsewhere": (
        f"{PREFIX}model.lm_head.lora_A.weight",
        f"looked for under {PREFIX}model.embed_tokens and {PREFIX}lm_head",
    ),
    "rows_elsewhere": (
        f"{PREFIX}embed_tokens.token_adapter.trainable_tokens_delta",
        "replaced token rows are looked for under",
    ),
    "expert": (f"{PREFIX}model.layers.0.mlp.experts.lora_A.weight", "experts"),
    "numbered_expert": (f"{PREFIX}model.layers.0.mlp.experts.3.up_proj.lora_A.weight", "experts"),
    "other_adapter_name": (
        f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.mine.weight",
        "'default'",
    ),
    "no_module": (f"{PREFIX}lora_A", "not supported"),
    "other_kind": (f"{PREFIX}model.layers.0.self_attn.q_proj.lora_E", "not supported"),
}
UNKNOWN: dict[str, str] = {
    "layer_beyond_the_base": f"{PREFIX}model.layers.2.self_attn.q_proj.lora_A.weight",
    "padded_layer_number": f"{PREFIX}model.layers.00.self_attn.q_proj.lora_A.weight",
    "wrong_block": f"{PREFIX}model.layers.0.mlp.q_proj.lora_A.weight",
    "without_prefix": "model.layers.0.self_attn.q_proj.lora_A.weight",
    "half_prefix": "base_model.model.layers.0.self_attn.q_proj.lora_A.weight",
    "wrapped_prefix": f"module.{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight",
    "other_prefix": "diffusion_model.layers.0.self_attn.q_proj.lora_A.weight",
    "norm": f"{PREFIX}model.layers.0.input_layernorm.scale",
    "empty": "",
    "control_characters": "a\x1b[31m\nb",
}


@pytest.mark.parametrize("kind", EXTRA)
def test_tensors_of_other_kinds_are_refused_by_name(
    kind: str, dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    name, reason = EXTRA[kind]
    tensors = plain_tensors(dims) | {name: torch.ones(4, 64)}
    message = refusal(write_adapter(tmp_path, plain_config(), tensors), spec, "tensor_unsupported")
    assert name in message and reason in message


def test_a_name_without_end_is_refused_before_it_is_taken_apart(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = plain_tensors(dims) | {".lora_A." * 50_000: torch.ones(1)}
    message = refusal(write_adapter(tmp_path, plain_config(), tensors), spec, "tensor_unknown")
    assert "its name has 400000 characters" in message and len(message) < 400


VECTORS = {"use_dora": "lora_magnitude_vector", "lora_bias": "lora_B.bias"}


@pytest.mark.parametrize("field", VECTORS)
def test_vectors_without_their_field_and_fields_without_their_vectors_are_refused(
    field: str, dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = plain_tensors(dims)
    name = f"{PREFIX}model.layers.0.self_attn.q_proj.{VECTORS[field]}"
    extra = tensors | {name: torch.ones(64)}
    message = refusal(write_adapter(tmp_path, plain_config(), extra), spec, "tensor_unknown")
    assert name in message and field in message
    config = plain_config(**{field: True})
    message = refusal(write_adapter(tmp_path, config, extra), spec, "tensor_missing")
    assert field in message and "model.layers.0.self_attn.k_proj" in message


@pytest.mark.parametrize("field", VECTORS)
def test_vectors_are_checked_like_the_pair(
    field: str, dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    config = plain_config(target_modules=["v_proj"], layers_to_transform=[0], **{field: True})
    pair = tensors_of(random_modules(dims, {(0, 2): 4}))
    name = f"{PREFIX}model.layers.0.self_attn.v_proj.{VECTORS[field]}"
    for bad, code, told in (
        (torch.ones(33), "shape_mismatch", "[32]"),
        (torch.ones(32, 1), "shape_mismatch", "[32]"),
        (torch.ones(32, dtype=torch.float64), "dtype_unsupported", "float64"),
        (torch.full((32,), torch.inf), "not_finite", "32 values"),
    ):
        message = refusal(write_adapter(tmp_path, config, pair | {name: bad}), spec, code)
        assert name in message and told in message


@pytest.mark.parametrize("infix", ["", "_orig_mod.", "default"])
def test_vectors_have_the_names_that_other_trainers_write(
    infix: str, dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    modules = random_modules(dims, {(0, 2): 4})
    stem = f"{PREFIX}model.layers.0.self_attn.v_proj"
    if infix == "_orig_mod.":
        stem = stem.replace("layers.0.", "layers.0._orig_mod.")
    dot = ".default" if infix == "default" else ""
    vector = torch.rand(32)
    for field, names in (
        ("use_dora", (f"lora_magnitude_vector{dot}", f"lora_magnitude_vector{dot}.weight")),
        ("lora_bias", (f"lora_B{dot}.bias",)),
    ):
        config = plain_config(target_modules=["v_proj"], layers_to_transform=[0], **{field: True})
        for name in names:
            tensors = tensors_of(modules) | {f"{stem}.{name}": vector}
            module = read_adapter(write_adapter(tmp_path, config, tensors), spec).modules[0, 2]
            found = module.magnitude if field == "use_dora" else module.bias
            assert found is not None and torch.equal(found, vector)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_unknown_tensors_are_refused_by_name(
    kind: str, dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = plain_tensors(dims) | {UNKNOWN[kind]: torch.ones(4, 64)}
    message = refusal(write_adapter(tmp_path, plain_config(), tensors), spec, "tensor_unknown")
    assert ascii(UNKNOWN[kind])[1:-1] in message and message.isprintable()


def test_a_key_prefix_that_matches_nothing_is_refused(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = renamed(plain_tensors(dims), [("model.model.layers", "model.language_model.layers")])
    message = refusal(write_adapter(tmp_path, plain_config(), tensors), spec, "tensor_unknown")
    assert "language_model.layers.0" in message


@pytest.mark.parametrize(
    "changes",
    [
        [(".weight", ".default.weight")],
        [("base_model.model.model.", "base_model.model._orig_mod.model.")],
        [("base_model.", "_orig_mod.base_model.")],
        [(".self_attn.", "._orig_mod.self_attn."), (".weight", ".default.weight")],
    ],
    ids=["default", "compiled_model", "compiled_wrapper", "compiled_layers"],
)
def test_names_of_other_writers_mean_the_same_revision(
    changes: list[tuple[str, str]], dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = plain_tensors(dims)
    plain = read_adapter(write_adapter(tmp_path / "a", plain_config(), tensors), spec)
    other = renamed(tensors, changes)
    assert set(other) != set(tensors)
    mapped = read_adapter(write_adapter(tmp_path / "b", plain_config(), other), spec)
    assert mapped.digest == plain.digest


def test_two_names_of_one_tensor_are_refused(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    twin = Q0A.replace(".weight", ".default.weight")
    tensors = plain_tensors(dims) | {twin: torch.ones(4, 64)}
    message = refusal(write_adapter(tmp_path, plain_config(), tensors), spec, "tensor_unknown")
    assert Q0A in message and twin in message


@pytest.mark.parametrize(("missing", "left"), [(Q0A, Q0B), (Q0B, Q0A)])
def test_half_a_pair_is_refused(
    missing: str, left: str, dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = plain_tensors(dims)
    del tensors[missing]
    message = refusal(write_adapter(tmp_path, plain_config(), tensors), spec, "tensor_missing")
    assert left in message


def test_a_targeted_module_without_tensors_is_refused(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = plain_tensors(dims)
    del tensors[Q0A], tensors[Q0B]
    message = refusal(write_adapter(tmp_path, plain_config(), tensors), spec, "tensor_missing")
    assert "model.layers.0.self_attn.q_proj" in message


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["k_proj"]},
        {"target_modules": []},
        {"target_modules": ""},
        {"target_modules": ".*k_proj"},
        {"exclude_modules": ["q_proj"]},
        {"layers_to_transform": 1},
        {"layers_to_transform": [0, 1], "layers_pattern": "blocks"},
    ],
)
def test_tensors_outside_the_configs_targets_are_refused(
    fields: dict[str, Any], dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path, plain_config(**fields), plain_tensors(dims))
    assert "model.layers.0.self_attn.q_proj" in refusal(adapter, spec, "tensor_unknown")


def test_without_target_modules_the_tensors_decide(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = tensors_of(random_modules(dims, {(1, 3): 4}))
    adapter = write_adapter(tmp_path, plain_config(target_modules=None), tensors)
    assert list(read_adapter(adapter, spec).modules) == [(1, 3)]


def test_no_tensor_at_all_is_refused(spec: ModelSpec, tmp_path: Path) -> None:
    for index, targets in enumerate((["q_proj"], None)):
        config = plain_config(target_modules=targets)
        adapter = write_adapter(tmp_path / str(index), config, {})
        assert "0 modules" in refusal(adapter, spec, "nothing_applied")


def test_wrong_base_is_refused_with_both_numbers(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = plain_tensors(dims)
    tensors[name_of(0, "gate_proj", "B")] = torch.ones(256, 4)
    message = refusal(write_adapter(tmp_path, plain_config(), tensors), spec, "shape_mismatch")
    assert "[256, 4]" in message and "[128, 64]" in message


def test_rank_64_in_config_and_8_in_tensors_is_refused_with_both_numbers(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = tensors_of(random_modules(dims, every_site(dims, 8)))
    message = refusal(write_adapter(tmp_path, plain_config(r=64), tensors), spec, "shape_mismatch")
    assert "[8, 64]" in message and "rank 64" in message


@pytest.mark.parametrize("shape", [(0,), (4, 0), (256,), (1, 4, 64), (), (64, 4)], ids=str)
def test_odd_shapes_are_refused(
    shape: tuple[int, ...], dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = plain_tensors(dims) | {Q0A: torch.ones(shape)}
    message = refusal(write_adapter(tmp_path, plain_config(), tensors), spec, "shape_mismatch")
    assert Q0A in message and str(list(shape)) in message
    assert ("ZeRO-3" in message) == (0 in shape)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int8, torch.bool, torch.float8_e4m3fn, torch.int64], ids=str
)
def test_other_dtypes_are_refused(
    dtype: torch.dtype, dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = plain_tensors(dims)
    tensors[Q0A] = tensors[Q0A].to(dtype)
    message = refusal(write_adapter(tmp_path, plain_config(), tensors), spec, "dtype_unsupported")
    assert Q0A in message and str(dtype) in message


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_floating_dtypes_are_kept(
    dtype: torch.dtype, dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path, plain_config(), plain_tensors(dims, dtype=dtype))
    modules = read_adapter(adapter, spec).modules.values()
    assert {m.a.dtype for m in modules} | {m.b.dtype for m in modules} == {dtype}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_nan_or_infinity_is_refused(
    value: float, dtype: torch.dtype, dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    tensors = plain_tensors(dims, dtype=dtype)
    tensors[Q0B][63, 3] = value
    message = refusal(write_adapter(tmp_path, plain_config(), tensors), spec, "not_finite")
    assert Q0B in message and "1 values" in message


def test_another_base_name_earns_a_warning_and_is_never_looked_up(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    config = plain_config(base_model_name_or_path="org/other-base")
    adapter = write_adapter(tmp_path, config, plain_tensors(dims))
    (warning,) = read_adapter(adapter, spec, base_names=("org/base", "base", "base")).warnings
    assert "'org/other-base'" in warning and warning.endswith("as 'org/base', 'base'")
    assert read_adapter(adapter, spec, base_names=("org/other-base",)).warnings == ()


def test_config_entries_that_match_nothing_earn_warnings(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    config = plain_config(
        target_modules=[*plain_config()["target_modules"], "query_key_value"],
        layers_to_transform=[0, 1, 7],
        alpha_pattern={"dense": 3},
    )
    warnings = read_adapter(write_adapter(tmp_path, config, plain_tensors(dims)), spec).warnings
    assert ["query_key_value" in warnings[0], "7" in warnings[1], "dense" in warnings[2]] == [
        True
    ] * 3


class TestDigest:
    def test_does_not_depend_on_layout_or_idle_fields(
        self, dims: ModelDims, spec: ModelSpec, tmp_path: Path
    ) -> None:
        tensors = plain_tensors(dims)
        first = write_adapter(tmp_path / "a", plain_config(), tensors)
        config = plain_config(lora_dropout=0.3, use_rslora=True, lora_alpha=4, inference_mode=True)
        second = write_adapter(
            tmp_path / "b", dict(reversed(config.items())), dict(reversed(tensors.items()))
        )
        assert read_adapter(first, spec).digest == read_adapter(second, spec).digest

    def test_depends_on_scale_dtype_and_every_value(
        self, dims: ModelDims, spec: ModelSpec, tmp_path: Path
    ) -> None:
        tensors = plain_tensors(dims, dtype=torch.float16)
        changed = {name: tensor.clone() for name, tensor in tensors.items()}
        changed[Q0B][5, 1] += 1
        variants = [
            (plain_config(), tensors),
            (plain_config(lora_alpha=9), tensors),
            (plain_config(), {name: t.float() for name, t in tensors.items()}),
            (plain_config(), changed),
        ]
        digests = [
            read_adapter(write_adapter(tmp_path / str(i), *variant), spec).digest
            for i, variant in enumerate(variants)
        ]
        assert len(set(digests)) == len(variants)
        assert all(len(d) == 64 and set(d) <= set("0123456789abcdef") for d in digests)
