"""The Triton norms, activation and rotary positions against the reference."""

import pytest
import torch

from kernels.fused import gpu, reference
from tests.kernels.truth import assert_near, bits

DTYPES = (torch.float32, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(0, 64), (1, 576), (5, 33), (3, 9, 64), (17, 1), (9, 4100), (40, 16), (64,)]
)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    assert_near(gpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_reads_views_of_a_projection() -> None:
    heads = torch.randn(5, 12, 32)
    weight = torch.randn(32)
    for view in (heads[:, 3:8], heads[:, 3], heads.transpose(0, 1), heads.transpose(1, 2)[..., :8]):
        gain = weight[: view.shape[-1]]
        expected = reference.rms_norm(view.contiguous(), gain, 1e-5)
        assert_near(gpu.rms_norm(view, gain, 1e-5), expected)


def test_weights_may_have_another_dtype() -> None:
    x, weight = torch.randn(5, 96).half(), torch.randn(96)
    assert_near(gpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (5, 96), (1, 4100)])
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = (torch.randn(shape).to(dtype) for _ in range(2))
    weight = torch.randn(shape[1]).to(dtype)
    before = bits(x), bits(residual)
    normed, total = gpu.add_rms_norm(x, residual, weight, 1e-6)
    assert bits(total) == bits(x + residual)
    assert_near(normed, reference.rms_norm(x + residual, weight, 1e-6))
    assert (bits(x), bits(residual)) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_delta_is_added_first_and_rounded(dtype: torch.dtype) -> None:
    x, residual, delta = (torch.randn(5, 96).to(dtype) for _ in range(3))
    weight = torch.randn(96).to(dtype)
    before = bits(x), bits(delta)
    normed, total = gpu.add_rms_norm(x, residual, weight, 1e-6, delta)
    assert bits(total) == bits((x + delta) + residual)
    assert_near(normed, reference.add_rms_norm(x, residual, weight, 1e-6, delta)[0])
    assert_near(gpu.silu_mul(x, delta), reference.silu_mul(x + delta))
    assert (bits(x), bits(delta)) == before


def test_a_delta_may_have_other_strides_but_no_other_shape_or_dtype() -> None:
    wide, delta, weight = torch.randn(5, 40), torch.randn(5, 20), torch.randn(20)
    x = wide[:, 4:24]
    assert_near(gpu.silu_mul(x, delta), reference.silu_mul(x + delta))
    for got, expected in zip(
        gpu.add_rms_norm(x, x, weight, 1e-6, delta),
        reference.add_rms_norm(x + delta, x, weight, 1e-6),
        strict=True,
    ):
        assert_near(got, expected)
    for wrong in (delta[1:], delta.half()):
        for ops in (gpu, reference):
            with pytest.raises(ValueError, match="delta must be"):
                ops.add_rms_norm(x, x, weight, 1e-6, wrong)
            with pytest.raises(ValueError, match="delta must be"):
                ops.silu_mul(x, wrong)


def test_a_nan_row_stays_alone() -> None:
    x, weight = torch.randn(7, 64), torch.randn(64)
    clean = gpu.rms_norm(x, weight, 1e-5)
    x[3] = float("nan")
    dirty = gpu.rms_norm(x, weight, 1e-5)
    assert dirty[3].isnan().all()
    assert bits(dirty[[0, 1, 2, 4, 5, 6]]) == bits(clean[[0, 1, 2, 4, 5, 6]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (1, 2), (5, 192), (3, 4098)])
def test_silu_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = torch.randn(shape).to(dtype) * 4
    assert_near(gpu.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_silu_mul_reads_strided_rows() -> None:
    wide = torch.randn(5, 40)
    assert_near(gpu.silu_mul(wide[:, 4:24]), reference.silu_mul(wide[:, 4:24]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 16, 80, 256])
@pytest.mark.parametrize("heads", [(9, 3), (1, 1), (4, 0), (0, 2), (28, 4)])
def test_rotary(heads: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    q, k = torch.randn(5, sum(heads), dim).to(dtype).split(heads, 1)
    cos_sin, positions = torch.randn(64, dim), torch.tensor([0, 1, 63, 37, 37])
    actual = gpu.rotary(q, k, cos_sin, positions)
    for got, expected in zip(actual, reference.rotary(q, k, cos_sin, positions), strict=True):
        assert_near(got, expected)


def test_wrong_inputs_are_named() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match="weight must be"):
        gpu.rms_norm(x, torch.randn(7), 1e-5)
    with pytest.raises(ValueError, match="x must be"):
        gpu.rms_norm(x.double(), torch.randn(8).double(), 1e-5)
    with pytest.raises(ValueError, match="gate_up must be"):
        gpu.silu_mul(torch.randn(2, 7))
    heads = torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match="cos_sin must be"):
        gpu.rotary(heads, heads, torch.randn(8, 4).T, torch.zeros(2, dtype=torch.int64))
