"""Configuration of the engine: one frozen dataclass, checked when it is made.

The command line, the environment and the configuration file are all derived from these fields
(see ``launch/options/``); the docstring under a field is its help text. Nothing here imports
torch, so that ``--help`` answers at once.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin, get_type_hints

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
MAX_CPU_ARENA = 4 * GIB
"""Largest arena of a CPU rank that is chosen without being asked for."""
MAX_HOST_MEMORY = 8 * GIB
"""Most memory of a host for one rank's adapters that is chosen without being asked for."""

Bytes = Annotated[int, "bytes"]
"""A number of bytes; text sources may write it with a unit, as in ``2GiB`` or ``512MB``."""

_UNITS = {"": 1, "b": 1, "k": KIB, "kib": KIB, "m": MIB, "mib": MIB, "g": GIB, "gib": GIB}
_UNITS |= {"t": TIB, "tib": TIB, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


class ConfigError(ValueError):
    """A configuration field has a value outside what is allowed; ``field`` is its name."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={value!r} is not allowed: {allowed}")
        self.field = field


def parse_size(text: str) -> int:
    """Read a number of bytes such as ``4096``, ``512MiB``, ``1.5g`` or ``2GB``.

    ``K``, ``M``, ``G``, ``T`` and ``KiB`` … are powers of 1024; ``KB`` … are powers of 1000.

    Raises:
        ValueError: the text is not a number followed by one of these units.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size: write bytes or a unit, as 4096, 512MiB or 2GB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def check_types(config: Any) -> None:
    """Check that every field of a configuration dataclass holds what its annotation says.

    Raises:
        ConfigError: a value has another type, or is none of a ``Literal``'s values.
    """
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not _matches(value, hint):
            raise ConfigError(name, value, allowed_by(hint))


def literal_options(hint: Any) -> tuple[str, ...]:
    """The values that a ``Literal[...]`` or ``Literal[...] | None`` lists; else empty."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return tuple(value for part in get_args(hint) for value in literal_options(part))
    return ()


def allowed_by(hint: Any) -> str:
    """Name in words what an annotation allows."""
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
    if literal_options(hint):
        listed = ", ".join(literal_options(hint))
        return f"one of {listed}" + (", none" if type(None) in get_args(hint) else "")
    if get_origin(hint) in (Union, UnionType):
        part = next(part for part in get_args(hint) if part is not type(None))
        return f"{allowed_by(part)}, or none"
    return names.get(hint, "a tuple of text, or of pairs of text")


def _matches(value: object, hint: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_matches(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if origin is tuple and isinstance(value, tuple):
        each = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return len(value) == len(each) and all(map(_matches, value, each))
    if hint in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if hint is float else origin or hint)


def check_number(
    config: Any,
    name: str,
    low: float,
    high: float = math.inf,
    *,
    low_open: bool = False,
    unit: str = "",
    low_is: str = "",
) -> None:
    """Check that a number field is None or finite and from ``low`` to ``high``.

    ``low_is`` names the field that ``low`` comes from, if it is one.

    Raises:
        ConfigError: it is not.
    """
    value = getattr(config, name)
    if value is None or (
        math.isfinite(value) and low <= value <= high and not (low_open and value == low)
    ):
        return
    start = f"{'above' if low_open else 'from'} {low}{low_is and f' ({low_is})'}"
    stop = "" if high == math.inf else f" to {high}"
    raise ConfigError(name, value, f"a number{unit and f' of {unit}'} {start}{stop}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What the engine serves, and with which limits. Equal on every rank.

    Raises:
        ConfigError: a field has a value that is not allowed; the message names all three.
    """

    model: str
    """Base model: a local directory, or a Hugging Face Hub id such as ORG/NAME."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    served_model_name: tuple[str, ...] = ()
    """Names that requests may use for the base model; without any, the value of model."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of activations; auto is bfloat16 on a GPU and float32 on the CPU."""
    quantize: Literal["nf4"] | None = None
    """Quantise a full-precision checkpoint while loading it."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """What the weights are; dummy makes random ones of the configuration's shapes, to measure."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where ranks compute; auto is cuda when a GPU is visible."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """How ranks exchange activations; auto is nccl between GPUs and gloo between CPUs. With gloo
    several ranks may share a GPU."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens; without it, what the model was made for."""
    max_num_seqs: int = 64
    """Most sequences in one step."""
    max_num_batched_tokens: int | None = None
    """Most tokens in one step, at least max_num_seqs; without it 8192 on a GPU, 512 on the CPU."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory that weights, scratch and the page arena may take together."""
    arena_bytes: Bytes | None = None
    """Size of a rank's page arena, as 2GiB; without it, what gpu_memory_utilization leaves, or on
    the CPU half the free memory divided by the ranks of the host, at most 4 GiB."""
    num_pages: int | None = None
    """Exact number of arena pages; overrides the sizes above."""
    adapter_memory_fraction: float = 0.5
    """Share of the arena that adapters without a running request may keep."""
    adapter_host_memory: Bytes | None = None
    """Memory of the host, a rank, for adapters that are not in the arena, as 16GiB; without it a
    quarter of what is free, divided by the ranks of the host, at most 8 GiB. What does not fit is
    read again when a request needs it."""
    adapter_queue: int = 1024
    """Most requests that may wait for adapters that are being loaded; more are refused."""
    enable_prefix_caching: bool = True
    """Reuse the pages of equal prompt beginnings (same adapter revision and tenant)."""
    enforce_eager: bool = False
    """On a GPU, launch every kernel of a step instead of replaying captured steps."""
    max_lora_rank: int | None = None
    """On a GPU, LoRA rank up to which a start prepares for adapters that come later, besides those
    that are there; the first adapter of a larger one stops all tokens for some seconds. Without it,
    16 if adapters can come while serving (admin_key_file), else 0."""
    deterministic: bool = False
    """Make a request's tokens independent of whatever shares its batch, at some cost in speed."""
    seed: int | None = None
    """Seed for requests that bring none; without it one is drawn at start."""
    rank_timeout: float = 60.0
    """Seconds without a sign of life from a rank before the service ends, at least 1: a sign comes
    every half second."""
    drain_timeout: float = 25.0
    """Seconds that open requests get to finish when the service is told to stop."""
    cpu_threads: int = 1
    """Threads a rank computes with on the CPU."""
    keep_dense: bool = True
    """On the CPU, keep a copy of the weights, de-quantised, in the layout that is multiplied
    fastest: more memory."""
    lora: tuple[tuple[str, str], ...] = ()
    """Adapter to load at start, as NAME=DIRECTORY."""
    lora_dir: str | None = None
    """Directory whose subdirectories are adapters to load at start, named as they are."""
    lora_on_error: Literal["fail", "skip"] = "fail"
    """What an adapter that can't be loaded at start does: stop the start, or be left out."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("model", "revision", "lora_dir"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise ConfigError(name, value, "text that is not blank")
        for name, low in (("max_model_len", 2), ("max_num_seqs", 1), ("cpu_threads", 1)):
            check_number(self, name, low)
        check_number(self, "max_num_batched_tokens", self.max_num_seqs, low_is="max_num_seqs")
        check_number(self, "max_lora_rank", 0)
        check_number(self, "gpu_memory_utilization", 0, 1, low_open=True)
        check_number(self, "arena_bytes", MIB, unit="bytes")
        check_number(self, "num_pages", 1)
        check_number(self, "adapter_memory_fraction", 0, 1)
        check_number(self, "adapter_host_memory", 1, unit="bytes")
        check_number(self, "adapter_queue", 0)
        check_number(self, "seed", 0, 2**63 - 1)
        check_number(self, "rank_timeout", 1, unit="seconds")
        check_number(self, "drain_timeout", 0, unit="seconds")
        self._check_names()

    def _check_names(self) -> None:
        adapters = [name for name, _ in self.lora]
        for field, names in (("lora", adapters), ("served_model_name", self.served_model_name)):
            for name in names:
                if not name.strip():
                    raise ConfigError(field, name, "names that are not blank")
                if list(names).count(name) > 1:
                    raise ConfigError(field, name, "each name once")
        for name, path in self.lora:
            if not path.strip():
                raise ConfigError("lora", f"{name}={path}", "NAME=DIRECTORY")
            if name in self.base_names:
                raise ConfigError("lora", name, "a name that is not the base model's")

    @property
    def base_names(self) -> tuple[str, ...]:
        """Names under which requests reach the base model; the first one is shown."""
        return self.served_model_name or (self.model,)

    def resolve(self, *, cuda: bool, model_positions: int) -> Self:
        """A copy in which device, dtype, max_model_len and max_num_batched_tokens are concrete.

        ``cuda`` says whether a GPU is visible, ``model_positions`` how many positions the model
        was made for.

        Raises:
            ConfigError: device is cuda without a GPU, backend is nccl on the CPU, or
                max_model_len exceeds the model.
        """
        if self.device == "cuda" and not cuda:
            raise ConfigError("device", "cuda", "no GPU is visible; use cpu or auto")
        if self.max_model_len is not None and self.max_model_len > model_positions:
            raise ConfigError("max_model_len", self.max_model_len, f"at most {model_positions}")
        gpu = self.device == "cuda" or (self.device == "auto" and cuda)
        if self.backend == "nccl" and not gpu:
            raise ConfigError("backend", "nccl", "gloo or auto on the CPU")
        tokens = self.max_num_batched_tokens or max(8192 if gpu else 512, self.max_num_seqs)
        return dataclasses.replace(
            self,
            device="cuda" if gpu else "cpu",
            dtype=self.dtype if self.dtype != "auto" else ("bfloat16" if gpu else "float32"),
            max_model_len=self.max_model_len or model_positions,
            max_num_batched_tokens=tokens,
        )


def default_cpu_arena(free_bytes: int, local_ranks: int) -> int:
    """Arena of a CPU rank when none is asked for, in bytes, from what the host has free now.

    Call it once the weights are loaded: half of what is left stays with the system.
    """
    return min(MAX_CPU_ARENA, free_bytes // (2 * local_ranks))


def default_host_memory(free_bytes: int, local_ranks: int) -> int:
    """Memory of the host for a rank's adapters when none is asked for, in bytes.

    Call it once the arena is reserved; on a CPU that is memory of the host too, and the system
    gives it only when it is written.
    """
    return min(MAX_HOST_MEMORY, free_bytes // (4 * local_ranks))
