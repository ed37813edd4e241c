"""Read and check the header of a safetensors file before anything else touches it.

Format: 8 bytes, the little-endian length n of the header; n bytes of UTF-8 JSON, an object of
name -> {"dtype", "shape", "data_offsets": [begin, end]} and an optional "__metadata__"; then the
tensors' bytes, which the offsets cover from 0 to the end of the file without hole or overlap.
Source: the safetensors specification.
"""

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

__all__ = ["MAX_HEADER_BYTES", "CheckpointError", "TensorInfo", "parse_header", "read_header"]

Walk = Callable[[Iterable[tuple[str, Any]]], Iterable[tuple[str, Any]]]
"""Gives the same items; one that pauses between them lets other threads run Python."""

MAX_HEADER_BYTES: Final = 16 << 20
"""Longest header accepted. A 70B model in one NF4 file needs about 1 MB."""

_MAX_DIMS: Final = 8

_LFS_POINTER: Final = b"version https://git-lfs"

_DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class CheckpointError(ValueError):
    """A checkpoint that is missing, corrupt or not in a supported form; names file and reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One entry of a header."""

    dtype: torch.dtype
    """Element type."""
    shape: tuple[int, ...]
    """Shape as stored."""
    begin: int
    """First byte of the data in the file."""
    end: int
    """One past the last byte of the data in the file."""

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.end - self.begin


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """Header of the safetensors file at ``path``, fully checked against the file's size.

    Raises:
        CheckpointError: if the file is missing or anything in it is not as the format says.
    """
    where = Path(path)
    if not where.is_file():
        raise CheckpointError(f"{where}: no such file")
    with where.open("rb") as file:
        return parse_header(file, where)


def parse_header(file: BinaryIO, where: Path, walk: Walk = iter) -> dict[str, TensorInfo]:
    """As `read_header`, for a file already open; ``where`` is its name in errors."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    try:
        data_begin, entries = _read_json(file, size)
        infos = {
            name: _check_entry(name, entry, data_begin) for name, entry in walk(entries.items())
        }
        _check_cover(infos, data_begin, size)
    except _Bad as bad:
        raise CheckpointError(f"{where}: {bad}") from None
    return infos


class _Bad(Exception):
    """Reason of a refusal, before the file's name is added."""


def _read_json(file: BinaryIO, size: int) -> tuple[int, dict[str, Any]]:
    """Where the data begins, and the entries without metadata."""
    start = file.read(len(_LFS_POINTER))
    if start == _LFS_POINTER:
        raise _Bad("is a git-lfs pointer, not the file itself; fetch it with 'git lfs pull'")
    if size < 8:
        raise _Bad(f"{size} bytes are too few for a safetensors file")
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise _Bad(f"header length {length} exceeds the limit of {MAX_HEADER_BYTES} bytes")
    if length > size - 8:
        raise _Bad(f"header length {length} exceeds the file's {size} bytes")
    file.seek(8)
    try:
        parsed = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError:
        raise _Bad("header is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise _Bad(f"header is not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise _Bad("header is not a JSON object")
    metadata = parsed.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _Bad("__metadata__ is not a map of strings")
    return 8 + length, parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, unless a name stands in it twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _check_entry(name: str, entry: object, data_begin: int) -> TensorInfo:
    """One entry, with offsets relative to the file."""
    label = f"tensor {name[:200]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _Bad(f"{label} must have dtype, shape and data_offsets")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise _Bad(f"{label} has unsupported dtype {str(entry['dtype'])[:40]!r}")
    shape, offsets = _naturals(entry["shape"]), _naturals(entry["data_offsets"])
    if shape is None:
        raise _Bad(f"{label} has shape {str(entry['shape'])[:80]}, need non-negative integers")
    if offsets is None or len(offsets) != 2:
        raise _Bad(f"{label} has data_offsets {str(entry['data_offsets'])[:80]}, need two")
    begin, end = offsets
    if len(shape) > _MAX_DIMS:
        raise _Bad(f"{label} has {len(shape)} dimensions, at most {_MAX_DIMS} are allowed")
    need = math.prod(shape) * dtype.itemsize
    if max(need, begin, end, *shape) >= 1 << 63:
        raise _Bad(f"{label} has a size that overflows 63 bits")
    if end - begin != need:
        raise _Bad(f"{label} has {end - begin} bytes, its shape {list(shape)} needs {need}")
    return TensorInfo(dtype=dtype, shape=shape, begin=data_begin + begin, end=data_begin + end)


def _naturals(value: object) -> tuple[int, ...] | None:
    """A JSON list of non-negative integers as a tuple, None for anything else."""
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        return None
    return tuple(value)


def _check_cover(infos: dict[str, TensorInfo], data_begin: int, size: int) -> None:
    """The data must cover the rest of the file exactly."""
    at = data_begin
    for name, info in sorted(infos.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != at:
            raise _Bad(f"tensor {name[:200]!r} begins at byte {info.begin}, expected {at}")
        at = info.end
    if at > size:
        raise _Bad(f"file is cut off: {size} bytes, the header needs {at}")
    if at < size:
        raise _Bad(f"{size - at} trailing bytes after the last tensor")
