"""bitsandbytes weights, cut for any number of ranks."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharding import (
    BnbTensor,
    Checkpoint,
    CheckpointError,
    Span,
    assemble,
    blocks,
    deal,
    expand,
    stack_rows,
)
from tests.sharding.bnb_files import NAME, STATE, edit_state, quantize, save, tensors_of, truth

# Local widths that are no multiple of the block (576 / 2, 896 / 4), blocks that cross rows (130,
# 7), an odd number of elements (33 x 7), one row, one column.
SHAPES = [(64, 576), (24, 896), (33, 7), (10, 130), (5, 64), (1, 200), (200, 1)]


def weight(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    return torch.randn(shape, generator=generator).to(dtype)


def cuts(shape: tuple[int, int], world: int, unit: int) -> list[list[tuple[Span, Span]]]:
    """The weight cut by rows and by columns, in units."""
    rows, cols = shape
    by_row = [s.times(unit, rows) for s in deal(-(-rows // unit), world)]
    by_col = [s.times(unit, cols) for s in deal(-(-cols // unit), world)]
    return [
        [(span, Span(0, cols)) for span in by_row],
        [(Span(0, rows), span) for span in by_col],
    ]


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_shards_of_any_world_put_together_equal_bitsandbytes_bit_for_bit(
    shape: tuple[int, int], double_quant: bool, tmp_path: Path
) -> None:
    packed, state = quantize(weight(shape), double_quant=double_quant)
    expected = truth(packed, state)
    with Checkpoint.open(save(tmp_path, tensors_of(packed, state))) as ckpt:
        tensor = BnbTensor.from_checkpoint(ckpt, NAME)
        assert tensor.shape == shape
        assert (tensor.blocksize, tensor.dtype) == (64, torch.bfloat16)
        for world in range(1, 10):
            for unit in (1, 7, 64):
                for parts in cuts(shape, world, unit):
                    shards = [(tensor.cut(rows, cols), rows, cols) for rows, cols in parts]
                    assert assemble(shape, shards).equal(expected)
        assert ckpt.unread == ()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_rectangle_equals_that_part_of_the_whole(tmp_path: Path, data: st.DataObject) -> None:
    shape = (data.draw(st.integers(1, 40)), data.draw(st.integers(1, 150)))
    blocksize = data.draw(st.sampled_from([32, 64, 128]))
    rows, cols = (
        Span(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape
    )
    packed, state = quantize(weight(shape), blocksize=blocksize)
    whole = truth(packed, state)
    with Checkpoint.open(save(tmp_path, tensors_of(packed, state))) as ckpt:
        shard = BnbTensor.from_checkpoint(ckpt, NAME).cut(rows, cols)
    part = expand(shard)
    assert shard.shape == (rows.size, cols.size)
    assert torch.equal(part.codes, whole.codes[rows.slice, cols.slice])
    assert torch.equal(part.absmax, whole.absmax[rows.slice, cols.slice])


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("packed_shape", [(-1, 1), (1, -1), (-1,)])
def test_storage_type_and_packed_shape_are_irrelevant(
    storage: torch.dtype, packed_shape: tuple[int, ...], tmp_path: Path
) -> None:
    packed, state = quantize(weight((16, 96)), storage=torch.uint8)
    expected = truth(packed, state)
    tensors = tensors_of(packed.flatten().view(storage).view(packed_shape), state)
    with Checkpoint.open(save(tmp_path, tensors)) as ckpt:
        tensor = BnbTensor.from_checkpoint(ckpt, NAME)
        shards = [(tensor.cut(rows, Span(0, 96)), rows, Span(0, 96)) for rows in deal(16, 3)]
    assert assemble((16, 96), shards).equal(expected)


def test_codes_that_spell_signalling_nans_survive_float_storage(tmp_path: Path) -> None:
    packed, state = quantize(weight((4, 64)), double_quant=False)
    bits = torch.tensor([0x7F800001, 0x7FA00000, -0x007FFFFF, 0x7F80FFFF], dtype=torch.int32)
    packed = bits.repeat(8).view(torch.uint8)
    expected = truth(packed, state)
    tensors = tensors_of(packed.view(torch.float32).view(-1, 1), state)
    with Checkpoint.open(save(tmp_path, tensors)) as ckpt:
        shard = BnbTensor.from_checkpoint(ckpt, NAME).cut(Span(0, 4), Span(0, 64))
    assert expand(shard).equal(expected)


def test_an_all_zero_block_has_scale_zero_and_code_seven(tmp_path: Path) -> None:
    values = weight((2, 128))
    values[1, :64] = 0
    with Checkpoint.open(save(tmp_path, tensors_of(*quantize(values, double_quant=False)))) as ckpt:
        part = expand(BnbTensor.from_checkpoint(ckpt, NAME).cut(Span(1, 2), Span(0, 64)))
    assert set(part.codes.flatten().tolist()) == {7}
    assert set(part.absmax.flatten().tolist()) == {0.0}


def test_members_of_a_fused_weight_are_cut_one_by_one(tmp_path: Path) -> None:
    packed, state = quantize(weight((30, 100)))
    expected = truth(packed, state)
    cols = Span(0, 100)
    members = [Span(4, 9), Span(14, 16), Span(27, 30)]  # a rank's part of q, k and v
    with Checkpoint.open(save(tmp_path, tensors_of(packed, state))) as ckpt:
        tensor = BnbTensor.from_checkpoint(ckpt, NAME)
        fused = expand(stack_rows([tensor.cut(rows, cols) for rows in members]))
    index = [row for rows in members for row in rows]
    assert torch.equal(fused.codes, expected.codes[index])
    assert torch.equal(fused.absmax, expected.absmax[index])


def test_shards_of_different_width_are_not_stacked(tmp_path: Path) -> None:
    with Checkpoint.open(save(tmp_path, tensors_of(*quantize(weight((4, 64)))))) as ckpt:
        tensor = BnbTensor.from_checkpoint(ckpt, NAME)
        parts = [tensor.cut(Span(0, 4), Span(0, 64)), tensor.cut(Span(0, 4), Span(0, 32))]
    for unequal in (parts, []):
        with pytest.raises(ValueError, match="must agree"):
            stack_rows(unequal)


@pytest.mark.parametrize(("rows", "cols"), [(Span(0, 6), Span(0, 64)), (Span(0, 5), Span(0, 65))])
def test_a_cut_beyond_the_weight_is_refused(rows: Span, cols: Span, tmp_path: Path) -> None:
    with Checkpoint.open(save(tmp_path, tensors_of(*quantize(weight((5, 64)))))) as ckpt:
        tensor = BnbTensor.from_checkpoint(ckpt, NAME)
        with pytest.raises(ValueError, match=r"down_proj\.weight: rows 0:., cols 0:6. leave"):
            tensor.cut(rows, cols)


def test_only_the_rows_bytes_are_read_and_a_bounded_number_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blocks, "CHUNK_ELEMENTS", 640)
    packed, state = quantize(weight((64, 128)), double_quant=False)
    reads: list[tuple[int, int]] = []

    def read(start: int, stop: int) -> torch.Tensor:
        reads.append((start, stop))
        return packed.flatten()[start:stop].clone()

    whole = truth(packed, state)
    for rows, cols in [(Span(16, 32), Span(0, 128)), (Span(16, 32), Span(33, 70))]:
        reads.clear()
        shard = blocks.cut_packed(read, state.absmax, width=128, rows=rows, cols=cols, blocksize=64)
        assert min(reads)[0] >= 16 * 64
        assert max(reads)[1] <= 32 * 64
        assert max(stop - start for start, stop in reads) <= 320
        part = expand(shard)  # chunks join without a seam
        assert torch.equal(part.codes, whole.codes[rows.slice, cols.slice])
        assert torch.equal(part.absmax, whole.absmax[rows.slice, cols.slice])


@pytest.mark.parametrize(("rows", "cols"), [(Span(0, 9), Span(3, 90)), (Span(2, 9), Span(4, 99))])
def test_what_a_row_does_not_use_is_zero(rows: Span, cols: Span) -> None:
    packed, state = quantize(weight((9, 100)), blocksize=32, double_quant=False)
    shard = blocks.cut_packed(
        lambda start, stop: packed.flatten()[start:stop],
        state.absmax,
        width=100,
        rows=rows,
        cols=cols,
        blocksize=32,
    )
    assert int((shard.codes[:, -1] & 15).max()) == 0  # the widths are odd
    touched = (shard.phase + cols.size - 1) // 32 + 1
    assert len(set(touched.tolist())) == 2
    assert shard.absmax.shape[1] == int(touched.max())
    for row, count in enumerate(touched.tolist()):
        assert bool((shard.absmax[row, :count] > 0).all())
        assert bool((shard.absmax[row, count:] == 0).all())


def refused(path: Path, tensors: dict[str, torch.Tensor]) -> str:
    with Checkpoint.open(save(path, tensors)) as ckpt:
        assert BnbTensor.is_quantized(ckpt, NAME)
        with pytest.raises(CheckpointError) as refusal:
            BnbTensor.from_checkpoint(ckpt, NAME)
    assert NAME in str(refusal.value)
    return str(refusal.value)


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return tensors_of(*quantize(weight((20, 100))))


PARTS = [".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", STATE.removeprefix(NAME)]


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_refused_by_name(
    part: str, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    del tensors[NAME + part]
    assert NAME + part in refused(tmp_path, tensors)


@pytest.mark.parametrize("part", ["", *PARTS[:-1]])
def test_a_part_of_the_wrong_size_is_refused(
    part: str, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tensors[NAME + part] = tensors[NAME + part].flatten()[1:].clone()
    message = refused(tmp_path, tensors)
    assert "need" in message or "NF4 code book" in message


@pytest.mark.parametrize("part", PARTS[:-1])
def test_a_part_of_the_wrong_type_is_refused(
    part: str, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tensors[NAME + part] = tensors[NAME + part].half()
    assert "torch.float16, must be" in refused(tmp_path, tensors)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("part", [".nested_absmax", ".nested_quant_map"])
def test_nested_scales_that_are_not_finite_are_refused(
    part: str, value: float, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tensors[NAME + part][...] = value
    assert "absmax is not finite" in refused(tmp_path, tensors)


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = tensors_of(*quantize(weight((20, 100)), double_quant=False))
    tensors[NAME + ".absmax"][-1] = float("nan")
    assert "absmax is not finite" in refused(tmp_path, tensors)


def test_another_code_book_is_refused(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    tensors[NAME + ".quant_map"] = tensors[NAME + ".quant_map"].flip(0)
    assert "not the NF4 code book" in refused(tmp_path, tensors)


def test_fp4_is_refused_by_name(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    edit_state(tensors, quant_type="fp4")
    assert "quant_type=fp4" in refused(tmp_path, tensors)
    tensors[f"{NAME}.quant_state.bitsandbytes__fp4"] = tensors.pop(STATE)
    assert "quant_type=fp4" in refused(tmp_path, tensors)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("blocksize", 48),
        ("blocksize", 0),
        ("blocksize", "64"),
        ("blocksize", True),
        ("blocksize", None),
        ("dtype", "int8"),
        ("dtype", ["float16"]),
        ("shape", [20, 100, 1]),
        ("shape", [20]),
        ("shape", [20, -100]),
        ("shape", [20.0, 100]),
        ("shape", "20x100"),
        ("shape", None),
        ("nested_dtype", "float16"),
        ("nested_dtype", None),
        ("nested_blocksize", 0),
        ("nested_blocksize", None),
        ("nested_offset", "0"),
        ("nested_offset", float("nan")),
        ("nested_offset", 10**400),
        ("nested_offset", None),
    ],
)
def test_an_unsupported_state_is_refused_by_key(
    key: str, value: object, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    edit_state(tensors, **{key: value})
    assert f"{key}=" in refused(tmp_path, tensors)


def test_nested_scales_without_nested_keys_are_refused(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    edit_state(tensors, nested_dtype=None, nested_blocksize=None, nested_offset=None)
    assert "no nested keys" in refused(tmp_path, tensors)


def test_dimensions_come_from_the_state_and_must_match_the_bytes(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    edit_state(tensors, shape=[20, 102])
    assert "packed bytes: found 1000, need 1020" in refused(tmp_path, tensors)


@pytest.mark.parametrize("blob", [b"\xff\xfe", b"{", b"[]", b"[" * 100_000, b""])
def test_a_state_that_is_no_json_object_is_refused(
    blob: bytes, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tensors[STATE] = torch.tensor(list(blob), dtype=torch.uint8)
    assert "JSON" in refused(tmp_path, tensors)


def test_a_plain_weight_is_not_taken_for_a_quantised_one(tmp_path: Path) -> None:
    plain = {NAME: torch.zeros(2, 2), f"x.{NAME}.absmax": torch.zeros(1)}
    with Checkpoint.open(save(tmp_path, plain)) as ckpt:
        assert not BnbTensor.is_quantized(ckpt, NAME)
