"""What a config says of the two ends beside LoRA: whole saved modules, single rows, and tying."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sharding import VOCAB_SITES
from tp_engine.adapters.ends.replaced import EMBEDDING
from tp_engine.adapters.errors import shown
from tp_engine.adapters.fields import field_error, flag_of, names_of
from tp_engine.adapters.targets import VOCAB_MODULES


@dataclass(frozen=True, kw_only=True, slots=True)
class EndSettings:
    """The fields as they are; see `tp_engine.adapters.ends.rule` for what they mean for a base."""

    saved: tuple[str, ...] = ()
    """``modules_to_save``."""
    rows: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """``trainable_token_indices``: by end, the tokens in the order of the tensor's rows."""
    tie: bool = False
    """``ensure_weight_tying``."""


def parse_ends(on: Mapping[str, Any]) -> EndSettings:
    """Read the fields of a config; absent and empty ones are off.

    Raises:
        AdapterError: a field is of another form, or names another module.
    """
    saved = on.get("modules_to_save") or []
    if not isinstance(saved, list) or "" in saved:
        raise field_error("modules_to_save", saved, "a list of names of modules")
    return EndSettings(
        saved=names_of(on, "modules_to_save"),
        rows=_rows(on.get("trainable_token_indices") or {}),
        tie=flag_of(on, "ensure_weight_tying"),
    )


def _rows(value: object) -> dict[int, tuple[int, ...]]:
    """PEFT takes a list for the embedding's."""
    if not isinstance(value, dict):
        return {EMBEDDING: _ids("trainable_token_indices", value)}
    rows: dict[int, tuple[int, ...]] = {}
    for name, ids in value.items():
        end = end_of(name)
        if end is None or end in rows:
            allowed = "rows of 'embed_tokens' and of 'lm_head', each once"
            raise field_error("trainable_token_indices", value, allowed, "config_unsupported")
        rows[end] = _ids(f"trainable_token_indices[{shown(name)}]", ids)
    return rows


def end_of(name: str) -> int | None:
    """Which end a config's name means, None if neither."""
    names = VOCAB_MODULES if name in VOCAB_MODULES else VOCAB_SITES
    return names.index(name) if name in names else None


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise field_error(name, value, "a list of token ids from 0")
    if not value or len(set(value)) != len(value):
        raise field_error(name, value, "at least one token id, each once")
    return tuple(value)
