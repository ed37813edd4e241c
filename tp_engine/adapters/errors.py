"""What can be wrong with an adapter, as one exception with a code.

ValueError
  AdapterError    the adapter can't be loaded; ``code`` is one of `AdapterErrorCode`
    OutOfMemory   not now: a rank has no memory for it
  UnknownModel    (see `tp_engine.adapters.registry`) a request names nothing that is served
"""

from __future__ import annotations

from typing import Literal, get_args

AdapterErrorCode = Literal[
    "path_refused",
    "unreadable",
    "config_missing",
    "config_invalid",
    "config_unsupported",
    "weights_missing",
    "weights_corrupt",
    "tensor_unsupported",
    "tensor_unknown",
    "tensor_missing",
    "shape_mismatch",
    "dtype_unsupported",
    "not_finite",
    "nothing_applied",
    "name_refused",
    "out_of_memory",
]
"""Stable words for programs; the message is for people."""


class AdapterError(ValueError):
    """An adapter that is refused; the message names the tensor or field and the numbers."""

    def __init__(self, code: AdapterErrorCode, message: str) -> None:
        assert code in get_args(AdapterErrorCode)
        super().__init__(message)
        self.code: AdapterErrorCode = code


class OutOfMemory(AdapterError):
    """An adapter that is not loaded for want of memory, on whatever rank; worth another try."""

    def __init__(self, what: str, nbytes: int) -> None:
        """``what`` the memory is for; ``nbytes`` of it are wanted, 0: it is not known how many."""
        wanted = f": {nbytes} bytes are wanted" if nbytes else ""
        super().__init__("out_of_memory", f"there is no memory for {what}{wanted}")
        self.needs = what, nbytes
        self.nbytes = nbytes


def shown(value: object, limit: int = 120) -> str:
    """The value as it goes into a message: quoted, escaped and cut to ``limit`` characters."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
