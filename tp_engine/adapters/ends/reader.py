"""Read what an adapter's file holds of the two ends: as LoRA pairs and as replaced numbers.

Legend: V vocabulary, H hidden size, r LoRA rank, n replaced rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

from sharding import TOP, VOCAB_SITES, ModelDims, StoredTensor
from tp_engine.adapters.ends.keys import EndKey, EndTensor
from tp_engine.adapters.ends.replaced import EMBEDDING, HEAD, Replaced
from tp_engine.adapters.ends.rule import EndRule, EndRules
from tp_engine.adapters.errors import AdapterError, shown
from tp_engine.adapters.fields import field_error
from tp_engine.adapters.revision import LoraModule
from tp_engine.adapters.targets import VOCAB_MODULES, Place
from tp_engine.adapters.tensors import check_tensor, read_finite

CONFIG: Final = "adapter_config.json"
_PAIR: Final[frozenset[EndTensor]] = frozenset({"A", "B"})
_WORDS: Final[dict[EndTensor, str]] = {
    "A": "the A of its LoRA pair",
    "B": "the B of its LoRA pair",
    "weight": "its weight (modules_to_save)",
    "rows": "its trainable_tokens_delta (trainable_token_indices)",
}


class BaseEnds(Protocol):
    """The base's own matrices."""

    def holds(self, end: int, matrix: Tensor) -> bool:
        """Whether the base has the same numbers, [V, H], at an end."""
        ...


class Scales(Protocol):
    """See `tp_engine.adapters.config.LoraSettings`."""

    def rank_of(self, module: str) -> int: ...

    def scale_of(self, module: str) -> float: ...


@dataclass(kw_only=True, slots=True)
class Ends:
    """What an adapter changes at the two ends."""

    pairs: dict[Place, LoraModule] = field(default_factory=dict)
    """Of (`TOP`, end)."""
    replaced: dict[int, Replaced] = field(default_factory=dict)
    """By end."""


class EndReader:
    """Reads from one file for one base."""

    def __init__(
        self,
        tensors: Mapping[EndKey, StoredTensor],
        rules: EndRules,
        scales: Scales,
        dims: ModelDims,
        *,
        tied: bool,
    ) -> None:
        """Check all names, shapes and dtypes; nothing is read yet.

        Args:
            tensors: of the two ends.
            rules: what the config asks for.
            scales: the LoRA ranks and scales of modules.
            dims: of the base.
            tied: whether the base's head is its embedding.

        Raises:
            AdapterError: a tensor is missing, not asked for, or of a wrong shape or dtype.
        """
        self._tensors = tensors
        self._rules = rules
        self._scales = scales
        self._dims = dims
        self._tied = tied
        for end, rule in enumerate(rules.ends):
            self._check_presence(end, rule)
            self._check_ids(end, rule)
        for end, role in tensors:
            self._check_shape(end, role)

    def read(self, base: BaseEnds | None) -> Ends:
        """Read the numbers.

        Args:
            base: to leave out what the base holds anyway; None: nothing is left out.

        Raises:
            AdapterError: a number is not finite, or tensors that mean the same differ.
        """
        ends = Ends(pairs=self._pairs())
        whole, rows = self._whole(base), self._rows()
        for end in range(len(VOCAB_SITES)):
            ids, delta = rows.get(end, (None, None))
            replaced = Replaced(whole=whole.get(end), ids=ids, rows=delta)
            if replaced.tensors:
                ends.replaced[end] = replaced
        return ends

    def _check_presence(self, end: int, rule: EndRule) -> None:
        """The tensors present must be those that the config asks for."""
        found = {role for which, role in self._tensors if which == end}
        allowed: set[EndTensor] = {"weight", "base"}  # the base's own, whatever the config says
        needed: set[EndTensor] = {"weight"} if rule.saved else set()
        if rule.ids is not None:
            needed.add("rows")
        if rule.lora is not False:
            allowed |= _PAIR
        if found & _PAIR or (rule.lora and not (end == HEAD and self._rules.tied_lora)):
            needed |= _PAIR
        module = VOCAB_MODULES[end]
        for role in sorted(found - allowed - (needed - _PAIR)):
            name = shown(self._tensors[end, role].name)
            reason = f"{CONFIG} does not ask for it"
            raise AdapterError("tensor_unknown", f"tensor {name}: {reason}")
        for role in sorted(needed - found):
            reason = f"{CONFIG} changes {module}, but {_WORDS[role]} is not in the file"
            raise AdapterError("tensor_missing", reason)
        if found >= {"weight", "base"}:
            names = [shown(self._tensors[end, role].name) for role in ("weight", "base")]
            raise AdapterError("tensor_unknown", f"tensors {' and '.join(names)} mean the same")

    def _check_shape(self, end: int, role: EndTensor) -> None:
        vocab, hidden = self._dims.vocab, self._dims.hidden
        stored = self._tensors[end, role]
        if role == "rows":
            ids = self._rules.ends[end].ids
            assert ids is not None
            need = f"trainable_token_indices has {len(ids)} tokens and the base a width of {hidden}"
            check_tensor(stored, (len(ids), hidden), f"{need}, which need")
        elif role in ("weight", "base"):
            need = f"the base has a vocabulary of {vocab} and a width of {hidden}, which need"
            check_tensor(stored, (vocab, hidden), need)
        else:
            # Tied factors are the embedding's, whatever rank a pattern gives the head.
            of = EMBEDDING if self._rules.tied_lora else end
            rank = self._scales.rank_of(VOCAB_MODULES[of])
            a, b = (
                ((rank, vocab), (hidden, rank))
                if end == EMBEDDING
                else ((rank, hidden), (vocab, rank))
            )
            need = f"rank {rank} in {CONFIG}, a vocabulary of {vocab} and a width of {hidden} need"
            check_tensor(stored, a if role == "A" else b, need)

    def _check_ids(self, end: int, rule: EndRule) -> None:
        beyond = [token for token in rule.ids or () if token >= self._dims.vocab]
        if beyond:
            name = f"trainable_token_indices[{VOCAB_SITES[end]!r}]"
            allowed = f"token ids below {self._dims.vocab}, the base's vocabulary"
            raise field_error(name, beyond[0], allowed)

    def _pairs(self) -> dict[Place, LoraModule]:
        pairs = {}
        for end, module in enumerate(VOCAB_MODULES):
            if (end, "A") in self._tensors:
                pairs[TOP, end] = LoraModule(
                    a=read_finite(self._tensors[end, "A"]),
                    b=read_finite(self._tensors[end, "B"]),
                    scale=self._scales.scale_of(module),
                )
        if self._rules.tied_lora:
            of = pairs[TOP, EMBEDDING]
            tied = LoraModule(a=of.b.T, b=of.a.T, scale=self._scales.scale_of(VOCAB_MODULES[HEAD]))
            found = pairs.setdefault((TOP, HEAD), tied)
            if not (torch.equal(found.a, tied.a) and torch.equal(found.b, tied.b)):
                raise self._differ(("A",), "ensure_weight_tying makes the head's pair of them")
        return pairs

    def _whole(self, base: BaseEnds | None) -> dict[int, Tensor]:
        """The matrices that take the place of the base's.

        A tied base has one for both ends, so what was saved as its own changes both.
        """
        own: dict[int, Tensor] = {}
        saved: dict[int, Tensor] = {}
        for (end, role), stored in self._tensors.items():
            if role == "weight" and self._rules.ends[end].saved:
                saved[end] = read_finite(stored)
            elif role in ("weight", "base"):
                own[end] = read_finite(stored)
        if self._tied and len(own) == 2 and not torch.equal(*own.values()):
            raise self._differ(("weight", "base"), "the base has one matrix for both")
        if self._rules.tied_saved and not torch.equal(*saved.values()):
            raise self._differ(("weight",), "ensure_weight_tying makes one matrix of them")
        own = {e: matrix for e, matrix in own.items() if base is None or not base.holds(e, matrix)}
        if self._tied and own:
            own = dict.fromkeys(range(len(VOCAB_SITES)), next(iter(own.values())))
        if self._rules.tied_saved:
            saved[HEAD] = saved[EMBEDDING]
        return own | saved

    def _rows(self) -> dict[int, tuple[Tensor, Tensor]]:
        """By end the tokens, ascending, and the rows in their place."""
        rows = {}
        for end, rule in enumerate(self._rules.ends):
            if rule.ids is not None:
                ids, order = torch.sort(torch.tensor(rule.ids))
                rows[end] = ids, read_finite(self._tensors[end, "rows"])[order]
        if self._rules.tied_rows:
            rows[HEAD] = rows[EMBEDDING]
        return rows

    def _differ(self, roles: Sequence[EndTensor], reason: str) -> AdapterError:
        names = [shown(each.name) for (_, role), each in self._tensors.items() if role in roles]
        listed = " and ".join(names)
        return AdapterError("tensor_unsupported", f"tensors {listed} differ, but {reason}")
