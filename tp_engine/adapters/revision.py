"""An adapter's content on the host: whole, checked, in the dtype of its file.

Legend: r LoRA rank of a module, W its base weight.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from sharding import TOP, VOCAB_SITES
from tp_engine.adapters.ends.replaced import Replaced
from tp_engine.adapters.layout import ModuleRows
from tp_engine.adapters.targets import Place, module_name
from tp_engine.adapters.traits import AdapterTraits

_FORMAT: Final = b"tp-engine adapter revision 1\n"
_NONE: Final[Mapping[int, Replaced]] = {}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LoraModule:
    """What an adapter makes of one linear module, whose base weight is W and base bias c:

        y = gain * (W + scale * b @ a) x + scale * bias + c

    The gain is 1, or magnitude / norm of each row of (W + scale * b @ a) (DoRA).
    """

    a: Tensor
    """[r, in], float32, bfloat16 or float16."""
    b: Tensor
    """[out, r], likewise."""
    scale: float
    """alpha / r or alpha / sqrt(r), after the patterns; float64."""
    magnitude: Tensor | None = None
    """[out], likewise; None: no gain."""
    bias: Tensor | None = None
    """[out], likewise, of B; None: no bias."""

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]

    @property
    def rows(self) -> ModuleRows:
        """The rows that it takes in the arena."""
        return ModuleRows(self.rank, self.magnitude is not None, self.bias is not None)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by their role."""
        named = {"A": self.a, "B": self.b, "magnitude": self.magnitude, "bias": self.bias}
        return {role: tensor for role, tensor in named.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AdapterRevision:
    """One content of an adapter; two with the same digest are the same."""

    digest: str
    """`digest_of` its modules: its identity."""
    source: str
    """Directory it was read from, with links resolved."""
    modules: Mapping[Place, LoraModule]
    """By (layer, site), in ascending order."""
    expected: int
    """Modules that the config targets; equal to `applied`, or the adapter would be refused."""
    replaced: Mapping[int, Replaced] = field(default_factory=dict)
    """By end, in ascending order: what takes the place of the base's own numbers."""
    warnings: tuple[str, ...] = ()
    """What the operator should know although the adapter is valid."""

    @property
    def applied(self) -> int:
        """LoRA modules, and ends with replaced numbers, that are applied."""
        return len(self.modules) + len(self.replaced)

    @property
    def max_rank(self) -> int:
        """The largest LoRA rank of any module."""
        return max((module.rank for module in self.modules.values()), default=0)

    @property
    def traits(self) -> AdapterTraits:
        """What a step must do for it beside deltas."""
        affine = any(module.rows.gain or module.rows.bias for module in self.modules.values())
        return AdapterTraits.AFFINE if affine else AdapterTraits.NONE

    @property
    def ends(self) -> bool:
        """Whether the embedding or the LM head is changed."""
        return bool(self.replaced) or any(layer == TOP for layer, _ in self.modules)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, in the dtype of the file."""
        modules = sum(module.nbytes for module in self.modules.values())
        return modules + sum(change.nbytes for change in self.replaced.values())


def digest_of(modules: Mapping[Place, LoraModule], replaced: Mapping[int, Replaced] = _NONE) -> str:
    """SHA-256 in hex of what an adapter computes.

    Semantics: a header, then by ascending (layer, site) the module's name, the bits of its scale,
    and for A and B dtype, shape and bytes (little-endian, row-major), then likewise for magnitude
    and bias, after a line with that word, if there are such; then by ascending end its name and
    likewise what is replaced. So it does not depend on how files are laid out or keys are ordered,
    nor on config fields that change nothing.
    """
    sha = hashlib.sha256(_FORMAT)
    for (layer, site), module in sorted(modules.items()):
        sha.update(f"{module_name(layer, site)}\n".encode())
        sha.update(struct.pack("<d", module.scale))
        for role, tensor in module.tensors.items():
            if role not in ("A", "B"):
                sha.update(f"{role}\n".encode())
            _add(sha, tensor)
    for end, change in sorted(replaced.items()):
        for role, tensor in change.tensors.items():
            sha.update(f"{VOCAB_SITES[end]} {role}\n".encode())
            _add(sha, tensor)
    return sha.hexdigest()


def _add(sha: hashlib._Hash, tensor: Tensor) -> None:
    sha.update(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    sha.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
