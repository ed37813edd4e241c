"""The small ops against transformers and their reference."""

import pytest
import torch
from torch.nn.functional import silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from kernels.dispatch import Ops
from tests.kernels.truth import REFERENCE, bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 576), (5, 33), (3, 9, 64), (17, 1)])
def test_rms_norm_equals_transformers(ops: Ops, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    norm.weight.data.normal_()
    x = (torch.randn(shape) * 3).to(dtype)
    with torch.no_grad():
        expected = norm(x)
    for run in (ops.rms_norm, REFERENCE.rms_norm):
        assert bits(run(x, norm.weight.data, 1e-5)) == bits(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_is_the_sum_and_its_norm(ops: Ops, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(5, 96).to(dtype) for _ in range(2))
    weight = torch.randn(96).to(dtype)
    before = bits(x), bits(residual)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert bits(total) == bits(x + residual)
    assert bits(normed) == bits(REFERENCE.rms_norm(x + residual, weight, 1e-6))
    assert (bits(x), bits(residual)) == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (1, 2), (5, 192), (33, 98)])
def test_silu_mul_equals_the_two_steps(
    ops: Ops, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    gate_up = torch.randn(shape).to(dtype)
    gate, up = gate_up.chunk(2, dim=1)
    expected = silu(gate.contiguous()) * up
    torch.testing.assert_close(ops.silu_mul(gate_up), expected, rtol=1e-6, atol=0)
    assert bits(ops.silu_mul(gate_up)) == bits(REFERENCE.silu_mul(gate_up))


@pytest.mark.parametrize("dim", [16, 64, 256])
@pytest.mark.parametrize("heads", [(9, 3), (1, 1), (4, 0), (0, 2)])
def test_rotary_equals_transformers(ops: Ops, dim: int, heads: tuple[int, int]) -> None:
    config = LlamaConfig(
        hidden_size=4 * dim, num_attention_heads=4, head_dim=dim, max_position_embeddings=512
    )
    positions = torch.tensor([0, 1, 511, 37, 37])
    q, k = (torch.randn(5, count, dim) for count in heads)
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.arange(512)[None])
    cos_sin = torch.cat((cos[0, :, : dim // 2], sin[0, :, : dim // 2]), dim=1)
    expected = apply_rotary_pos_emb(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[:, positions], sin[:, positions]
    )
    for run in (ops.rotary, REFERENCE.rotary):
        for turned, truth in zip(run(q, k, cos_sin, positions), expected, strict=True):
            assert torch.equal(turned, truth[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_rounds_once(ops: Ops, dtype: torch.dtype) -> None:
    q, k = torch.randn(7, 4, 32).to(dtype), torch.randn(7, 2, 32).to(dtype)
    cos_sin, positions = torch.randn(20, 32), torch.randint(0, 20, (7,))
    before = bits(q), bits(k)
    expected = REFERENCE.rotary(q, k, cos_sin, positions)
    for turned, truth in zip(ops.rotary(q, k, cos_sin, positions), expected, strict=True):
        assert turned.dtype == dtype and bits(turned) == bits(truth)
    assert (bits(q), bits(k)) == before


def test_rotary_of_no_rows_is_empty(ops: Ops) -> None:
    empty = torch.empty(0, 3, 16)
    q, k = ops.rotary(empty, empty, torch.ones(4, 16), torch.empty(0, dtype=torch.int64))
    assert q.shape == k.shape == (0, 3, 16)


def test_wrong_inputs_are_named(ops: Ops) -> None:
    x, weight = torch.randn(2, 8), torch.randn(8)
    with pytest.raises(ValueError, match="weight must be"):
        ops.rms_norm(x, torch.randn(7), 1e-5)
    with pytest.raises(ValueError, match="residual must be"):
        ops.add_rms_norm(x, x.half(), weight, 1e-5)
    with pytest.raises(ValueError, match="gate_up must be"):
        ops.silu_mul(torch.randn(2, 7))
    heads, table = torch.randn(2, 3, 8), torch.randn(4, 8)
    with pytest.raises(ValueError, match="positions must be"):
        ops.rotary(heads, heads, table, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="positions must be contiguous"):
        ops.rotary(heads, heads, table, torch.zeros(4, dtype=torch.int64)[::2])
    with pytest.raises(ValueError, match="cos_sin must be"):
        ops.rotary(heads, heads, table.double(), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="k must be"):
        ops.rotary(heads, heads[:1], table, torch.zeros(2, dtype=torch.int64))
