"""The JSON that bitsandbytes stores beside a 4-bit weight."""

import json
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

__all__ = ["BLOCKSIZES", "NestedState", "QuantState", "parse_quant_state"]

BLOCKSIZES: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""Block sizes that bitsandbytes knows."""

_FLOAT32_MAX: Final = torch.finfo(torch.float32).max

_T = TypeVar("_T")

_DTYPES: Final = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NestedState:
    """Double quantisation: scales stored as 8-bit codes in blocks of their own."""

    blocksize: int
    """Scales a nested block."""
    offset: float
    """Added to every scale after expansion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantState:
    """What the packed tensors do not say themselves."""

    shape: tuple[int, int]
    """[out, in] of the weight."""
    blocksize: int
    """Elements a block."""
    dtype: torch.dtype
    """Type of the weight before quantisation, to which it is expanded."""
    nested: NestedState | None
    """Set if the scales themselves are quantised."""


def parse_quant_state(blob: bytes) -> QuantState:
    """Read the JSON of ``X.weight.quant_state.bitsandbytes__nf4``.

    Raises:
        ValueError: naming the key, its value and what is allowed.
    """
    try:
        state = json.loads(blob.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"quant_state is not UTF-8 JSON: {error}") from None
    if not isinstance(state, dict):
        raise ValueError("quant_state is not a JSON object")
    _member(state, "quant_type", ("nf4",))
    shape = state.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(type(n) is int and 0 < n < 1 << 31 for n in shape)
    ):
        raise ValueError(f"shape={str(shape)[:80]} must be two positive integers")
    return QuantState(
        shape=(shape[0], shape[1]),
        blocksize=_member(state, "blocksize", BLOCKSIZES),
        dtype=_DTYPES[_member(state, "dtype", tuple(_DTYPES))],
        nested=_parse_nested(state),
    )


def _parse_nested(state: dict[str, Any]) -> NestedState | None:
    """The nested keys: all of them, or none."""
    if not any(key.startswith("nested_") for key in state):
        return None
    _member(state, "nested_dtype", ("float32",))
    blocksize, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(blocksize) is not int or blocksize < 1:
        raise ValueError(f"nested_blocksize={str(blocksize)[:80]} must be a positive integer")
    if not isinstance(offset, int | float) or not abs(offset) <= _FLOAT32_MAX:
        raise ValueError(f"nested_offset={str(offset)[:80]} must be a finite number")
    return NestedState(blocksize=blocksize, offset=float(offset))


def _member(state: dict[str, Any], key: str, allowed: tuple[_T, ...]) -> _T:
    """A value that must be one of a few."""
    value = state.get(key)
    for item in allowed:
        if type(value) is type(item) and value == item:
            return item
    choices = ", ".join(str(item) for item in allowed)
    raise ValueError(f"{key}={str(value)[:80]} is not supported, must be one of {choices}")
