"""What is known of a revision without opening its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from tp_engine.adapters.revision import AdapterRevision
from tp_engine.adapters.targets import VOCAB_MODULES, module_name

LAYOUT_VERSION: Final = 1
"""Of the manifest and of what lies in a revision's directory."""


class ModuleEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One linear module that an adapter changes."""

    rank: int
    """LoRA rank r."""
    scale: float
    """alpha / r or alpha / sqrt(r), after the patterns."""
    dtype: str
    """Of A in the file, such as ``bfloat16``."""
    a: tuple[int, int]
    """[r, in] of the unsharded tensor."""
    b: tuple[int, int]
    """[out, r]."""
    magnitude: bool = False
    """Whether it has a gain by row (DoRA)."""
    bias: bool = False
    """Whether B has a bias."""


class ReplacedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What an adapter puts in the place of the base's own embedding or LM head."""

    dtype: str
    """In the file, such as ``bfloat16``."""
    whole: bool
    """Whether the whole matrix is replaced."""
    rows: int
    """Tokens whose rows are replaced, in that matrix or in the base's."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A revision as the registry shows it."""

    digest: str
    """The revision's identity, see `tp_engine.adapters.revision.digest_of`."""
    base_digest: str
    """Of the base that it was checked against."""
    architecture: str
    """Of that base, such as ``LlamaForCausalLM``."""
    vocab_size: int
    source: str
    """Where it was read from."""
    files: Mapping[str, str]
    """SHA-256 of each file, in hex, by name."""
    file_bytes: int
    """Size of all files."""
    tensor_bytes: int
    """Size of all tensors, in the dtype of the file."""
    modules: Mapping[str, ModuleEntry]
    """By the module's name, such as ``model.layers.0.self_attn.q_proj``."""
    applied: int
    """LoRA modules, and replaced ends, that are applied."""
    expected: int
    """Those that the config asks for."""
    replaced: Mapping[str, ReplacedEntry] = {}
    """By name, of ``model.embed_tokens`` and ``lm_head``."""
    warnings: tuple[str, ...] = ()
    layout_version: int = LAYOUT_VERSION


def module_entries(revision: AdapterRevision) -> dict[str, ModuleEntry]:
    """The modules of a revision, by name."""
    return {
        module_name(layer, site): ModuleEntry(
            rank=module.rank,
            scale=module.scale,
            dtype=str(module.a.dtype).removeprefix("torch."),
            a=(module.a.shape[0], module.a.shape[1]),
            b=(module.b.shape[0], module.b.shape[1]),
            magnitude=module.magnitude is not None,
            bias=module.bias is not None,
        )
        for (layer, site), module in revision.modules.items()
    }


def replaced_entries(revision: AdapterRevision) -> dict[str, ReplacedEntry]:
    """The replaced ends of a revision, by name."""
    entries = {}
    for end, change in revision.replaced.items():
        held = change.rows if change.whole is None else change.whole
        assert held is not None
        entries[VOCAB_MODULES[end]] = ReplacedEntry(
            dtype=str(held.dtype).removeprefix("torch."),
            whole=change.whole is not None,
            rows=0 if change.ids is None else change.ids.numel(),
        )
    return entries


def manifest_of(
    revision: AdapterRevision,
    base: tuple[str, str, int],
    files: Mapping[str, str],
    file_bytes: int,
) -> Manifest:
    """The manifest of a revision whose files are in place.

    Args:
        revision: that was read from them.
        base: its digest, architecture and vocabulary.
        files: SHA-256 of each file, by name.
        file_bytes: size of all files.
    """
    base_digest, architecture, vocab_size = base
    return Manifest(
        digest=revision.digest,
        base_digest=base_digest,
        architecture=architecture,
        vocab_size=vocab_size,
        source=revision.source,
        files=files,
        file_bytes=file_bytes,
        tensor_bytes=revision.nbytes,
        modules=module_entries(revision),
        replaced=replaced_entries(revision),
        applied=revision.applied,
        expected=revision.expected,
        warnings=revision.warnings,
    )
