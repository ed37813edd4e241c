"""The StepPlan protocol: what rank 0 tells every rank to do in one step.

A plan is frozen, ordered and versioned. On the wire it is one flat int64 vector, so that it needs
neither pickle nor names looked up at run time:

    [MAGIC, VERSION, kind, step, words, len(field 0), len(field 1), ...][field 0][field 1]...

Fields are one-dimensional int64 arrays in the order of the dataclass; tables are flattened row by
row. Floats travel as the bits of their float64 value.

Between plans each rank keeps state by *slot* (one slot per running request): its page table, its
last sampled token, its sampling parameters and token counts. Plans carry changes only, and a row's
token may be `LAST_SAMPLED`, so that plan n+1 can be made before step n has finished.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum

import numpy as np
import numpy.typing as npt

MAGIC = 0x7450_4C41_4E
VERSION = 3
LAST_SAMPLED = -1
"""As a row's token: the token that the row's slot sampled last."""
NO_ADAPTER = -1
"""As a segment's descriptor number: rows of the base alone."""

IntArray = npt.NDArray[np.int64]


class PlanKind(IntEnum):
    """What the ranks do with a plan."""

    STEP = 0
    """Run one forward pass."""
    HEARTBEAT = 1
    """Nothing; shows that rank 0 lives."""
    COPY = 2
    """Begin to copy an adapter from the host into the arena (`adapter`: handle, descriptor number,
    page ids), see `tp_engine.tiers.copies`."""
    FORGET = 3
    """Forget an adapter's host copy (`adapter`: handle)."""
    RETURN = 4
    """Leave the serving loop; the process goes on (offline use)."""
    STOP = 5
    """Leave the serving loop and the process."""
    CAPTURE = 6
    """Capture steps of few rows for LoRA ranks up to ``max_rank``, and with ``traits``."""
    DELIVER = 7
    """Begin to receive an adapter's page images (`adapter`: handle, descriptor words, host pages),
    see `tp_engine.tiers.delivery`."""


def _empty() -> IntArray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepPlan:
    """One step, the same on all ranks. Sequences of one row come first, and sequences stand in the
    order of their adapter segments."""

    kind: PlanKind
    step: int
    """Counts all plans from 0."""
    opens: IntArray = field(default_factory=_empty)
    """Slots to begin: `SlotInit` records one after the other."""
    page_updates: IntArray = field(default_factory=_empty)
    """Page-table changes [n, 3]: slot, index in its table, page id."""
    sequences: IntArray = field(default_factory=_empty)
    """Sequences of the step [B, 4]: slot, rows, context length after them, whether to sample."""
    tokens: IntArray = field(default_factory=_empty)
    """Token of each row [T], or `LAST_SAMPLED`."""
    segments: IntArray = field(default_factory=_empty)
    """Adapter segments [G, 2]: rows, descriptor number or `NO_ADAPTER`."""
    max_rank: int = 0
    """Largest LoRA rank among the segments."""
    traits: int = 0
    """What the step's adapters need beside deltas: bits of `tp_engine.adapters.AdapterTraits`."""
    candidates: int = 0
    """Best tokens that each rank's vocabulary shard reports for a sampled row."""
    full_rows: IntArray = field(default_factory=_empty)
    """Sampled rows (by their order among the sampled ones) whose whole logits rank 0 needs."""
    adapter: IntArray = field(default_factory=_empty)
    """What a plan about one adapter says of it, see `PlanKind`."""

    def encode(self) -> IntArray:
        """The wire form, int64 [words]."""
        arrays = [_as_array(getattr(self, name)) for name in _PAYLOAD]
        head = [MAGIC, VERSION, int(self.kind), self.step, 0, *(a.size for a in arrays)]
        head[4] = len(head) + sum(a.size for a in arrays)
        return np.concatenate([np.array(head, np.int64), *arrays])

    @classmethod
    def decode(cls, words: IntArray) -> StepPlan:
        """Read the wire form; trailing padding is allowed.

        Raises:
            PlanError: another protocol, version or kind, or lengths that do not add up.
        """
        if words.size < HEADER_WORDS or words[0] != MAGIC:
            raise PlanError("not a step plan: the first word is not the protocol's mark")
        if words[1] != VERSION:
            raise PlanError(f"step plan version {words[1]}; this rank speaks {VERSION}")
        lengths = words[5:HEADER_WORDS]
        total = int(words[4])
        if (lengths < 0).any() or HEADER_WORDS + int(lengths.sum()) != total or total > words.size:
            raise PlanError(f"step plan of {words.size} words has field lengths {lengths.tolist()}")
        if int(words[2]) not in set(PlanKind):
            raise PlanError(f"step plan of unknown kind {words[2]}")
        values: dict[str, object] = {"kind": PlanKind(int(words[2])), "step": int(words[3])}
        start = HEADER_WORDS
        for name, length in zip(_PAYLOAD, lengths.tolist(), strict=True):
            value = words[start : start + length]
            values[name] = int(value[0]) if name in _SCALARS else value
            start += length
        return cls(**values)  # type: ignore[arg-type]  # names and types follow the dataclass


_PAYLOAD = tuple(f.name for f in fields(StepPlan) if f.name not in ("kind", "step"))
_SCALARS = frozenset({"max_rank", "traits", "candidates"})
HEADER_WORDS = 5 + len(_PAYLOAD)
"""Words before the first field."""


class PlanError(RuntimeError):
    """A plan that this rank cannot read: the ranks run different code or lost step."""


def _as_array(value: int | IntArray) -> IntArray:
    return np.array([value], np.int64) if isinstance(value, int) else value.reshape(-1)


def float_bits(values: list[float]) -> list[int]:
    """Floats as the int64 bits of their float64 values."""
    bits: list[int] = np.array(values, np.float64).view(np.int64).tolist()
    return bits


def bits_float(bits: IntArray) -> list[float]:
    """Inverse of `float_bits`."""
    values: list[float] = np.ascontiguousarray(bits, np.int64).view(np.float64).tolist()
    return values


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotInit:
    """Everything a rank must know of a request to sample for it; sent when its slot begins.

    A preempted request begins again with its output so far in ``output``.
    """

    slot: int
    temperature: float
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    top_k: int
    """0 keeps all."""
    seed: int
    logprobs: int
    """Alternatives to report per token, 0 the sampled one alone; -1 none."""
    suppress_before: int
    """At positions below this, ``suppressed`` tokens are not sampled (``min_tokens``)."""
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    suppressed: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    """The prompt's tokens, only when a penalty needs them."""
    output: tuple[int, ...] = ()
    """The tokens generated so far, only when a penalty needs them."""

    def encode(self) -> list[int]:
        """One record: its own length, numbers, list lengths, lists."""
        lists = [
            list(self.bias_ids),
            float_bits(list(self.bias_values)),
            list(self.suppressed),
            list(self.prompt),
            list(self.output),
        ]
        words = [getattr(self, name) for name in _SLOT_INTS]
        words += float_bits([getattr(self, name) for name in _SLOT_FLOATS])
        words += [len(part) for part in lists]
        for part in lists:
            words += part
        return [len(words) + 1, *words]

    @classmethod
    def decode_all(cls, words: IntArray) -> list[SlotInit]:
        """Read ``StepPlan.opens``."""
        records, start = [], 0
        while start < words.size:
            end = start + int(words[start])
            records.append(cls._decode(words[start + 1 : end]))
            start = end
        return records

    @classmethod
    def _decode(cls, words: IntArray) -> SlotInit:
        ints, floats = len(_SLOT_INTS), len(_SLOT_FLOATS)
        values: dict[str, object] = dict(zip(_SLOT_INTS, words[:ints].tolist(), strict=True))
        numbers = bits_float(words[ints : ints + floats])
        values |= dict(zip(_SLOT_FLOATS, numbers, strict=True))
        start = ints + floats + len(_SLOT_LISTS)
        for name, length in zip(_SLOT_LISTS, words[ints + floats : start].tolist(), strict=True):
            part = words[start : start + length]
            values[name] = tuple(bits_float(part) if name == "bias_values" else part.tolist())
            start += length
        return cls(**values)  # type: ignore[arg-type]  # names and types follow the dataclass


_SLOT_INTS = ("slot", "top_k", "seed", "logprobs", "suppress_before")
_SLOT_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
_SLOT_LISTS = ("bias_ids", "bias_values", "suppressed", "prompt", "output")
