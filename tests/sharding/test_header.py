"""Corrupt safetensors files are refused by name and reason, before any tensor is read."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sharding import Checkpoint, CheckpointError, TensorInfo, read_header
from sharding.header import MAX_HEADER_BYTES


def pack(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(body) if length is None else length).to_bytes(8, "little") + body + data


def entry(dtype: object = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


EIGHT = bytes(8)
GOOD = pack({"a": entry()}, EIGHT)
OVERFLOW = 1 << 62

CORRUPT = {
    "empty": (b"", "0 bytes are too few"),
    "seven bytes": (GOOD[:7], "7 bytes are too few"),
    "huge length": (
        (0xFFFFFF0000003C).to_bytes(8, "little") + bytes(64),
        f"header length 72057589742960700 exceeds the limit of {MAX_HEADER_BYTES}",
    ),
    "length beyond the file": (pack({"a": entry()}, EIGHT, 4000), "exceeds the file's"),
    "not utf-8": (pack(b'{"\xff": 1}'), "not UTF-8"),
    "not json": (pack(b'{"a": '), "not JSON"),
    "too deep": (pack(b"[" * 200_000), "not JSON"),
    "not an object": (pack([1]), "not a JSON object"),
    "name twice": (pack(b'{"a": 1, "a": 2}'), "a name appears twice"),
    "two bytes cut off": (GOOD[:-2], "file is cut off"),
    "trailing bytes": (GOOD + b"xy", "2 trailing bytes"),
    "git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n",
        "git-lfs pointer",
    ),
    "hole": (pack({"a": entry(offsets=(4, 12))}, bytes(12)), "begins at byte"),
    "overlap": (pack({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "begins at byte"),
    "backward": (pack({"a": entry(offsets=(8, 0))}, EIGHT), "tensor 'a' has -8 bytes"),
    "negative": (pack({"a": entry(offsets=(-8, 0))}, EIGHT), "data_offsets"),
    "three offsets": (pack({"a": entry(offsets=(0, 8, 8))}, EIGHT), "data_offsets"),
    "size of another shape": (pack({"a": entry(shape=(3,))}, EIGHT), "needs 12"),
    "shape overflows": (pack({"a": entry(shape=(OVERFLOW, 4))}, EIGHT), "overflows 63 bits"),
    "offset overflows": (pack({"a": entry(offsets=(0, 1 << 64))}, EIGHT), "overflows 63 bits"),
    "product wraps to 8": (
        pack({"a": entry(shape=((1 << 62) + 1, 2, 1))}, EIGHT),
        "overflows 63 bits",
    ),
    "many dimensions": (pack({"a": entry(shape=(1,) * 9)}, EIGHT), "9 dimensions"),
    "float in shape": (pack({"a": entry(shape=(2.0,))}, EIGHT), "non-negative integers"),
    "bool in shape": (pack({"a": entry(shape=(True, 2))}, EIGHT), "non-negative integers"),
    "unknown dtype": (pack({"a": entry(dtype="F7")}, EIGHT), "unsupported dtype 'F7'"),
    "dtype not text": (pack({"a": entry(dtype=["F32"])}, EIGHT), "unsupported dtype"),
    "key missing": (pack({"a": {"dtype": "F32", "shape": [2]}}, EIGHT), "must have dtype"),
    "key left over": (pack({"a": {**entry(), "x": 1}}, EIGHT), "must have dtype"),
    "metadata not text": (pack({"__metadata__": {"a": 1}}), "__metadata__"),
}


@pytest.mark.parametrize("fault", CORRUPT)
def test_a_corrupt_file_is_refused_with_its_name_and_the_reason(fault: str, tmp_path: Path) -> None:
    content, reason = CORRUPT[fault]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ") as refusal:
        read_header(path)
    assert reason in str(refusal.value)
    assert len(str(refusal.value)) < 1000
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        Checkpoint.open(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        read_header(tmp_path / "adapter_model.safetensors")


def test_entries_say_where_the_bytes_are(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD)
    begin = len(GOOD) - 8
    expected = TensorInfo(dtype=torch.float32, shape=(2,), begin=begin, end=begin + 8)
    assert read_header(path) == {"a": expected}


def test_what_safetensors_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    dtypes = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64]
    tensors = {str(dtype): torch.zeros(3, 5, dtype=dtype) for dtype in dtypes}
    tensors |= {"empty": torch.zeros(0, 4), "scalar": torch.tensor(1.0)}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert {name: (info.dtype, info.shape) for name, info in header.items()} == {
        name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(at=st.integers(0, len(GOOD) - 9), value=st.integers(0, 255))
def test_a_changed_header_byte_is_refused_or_leaves_a_file_that_adds_up(
    tmp_path: Path, at: int, value: int
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(GOOD[:at] + bytes([value]) + GOOD[at + 1 :])
    try:
        header = read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        assert sum(info.nbytes for info in header.values()) == 8
