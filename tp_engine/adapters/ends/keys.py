"""Names of the tensors that belong to the two ends.

Format, as PEFT writes it: ``base_model.model.`` + module + what follows, without the adapter's name
(``default`` at its place is understood too):

    embed_tokens.lora_embedding_A [r, V], .lora_embedding_B [H, r]
    lm_head.lora_A.weight [r, H], .lora_B.weight [V, r]
    .weight [V, H]                              modules_to_save, or the base's own weight
    .base_layer.weight [V, H]                   the base's own weight
    .token_adapter.trainable_tokens_delta [n, H]
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Literal

from tp_engine.adapters.errors import AdapterError, shown
from tp_engine.adapters.keys import PREFIX, plain_name
from tp_engine.adapters.targets import VOCAB_MODULES
from tp_engine.interpreter import giving_way

EndTensor = Literal["A", "B", "weight", "base", "rows"]
"""What a tensor of a file is to its end."""
EndKey = tuple[int, EndTensor]
"""Which end, and what of it."""

_ROLES: Final[tuple[tuple[tuple[str, EndTensor], ...], ...]] = (
    ((r"lora_embedding_A(\.default)?", "A"), (r"lora_embedding_B(\.default)?", "B")),
    ((r"lora_A(\.default)?\.weight", "A"), (r"lora_B(\.default)?\.weight", "B")),
)
_SHARED: Final[tuple[tuple[str, EndTensor], ...]] = (
    (r"weight", "weight"),
    (r"base_layer\.weight", "base"),
    (r"token_adapter\.trainable_tokens_delta(\.default)?", "rows"),
)
_REFUSED: Final = (
    (r"lora_magnitude_vector\b.*", "DoRA on the embedding or the LM head is not supported"),
    (r"lora_B\.(.*\.)?bias", "a bias of the LM head's lora_B (lora_bias) is not supported"),
    (r".*", "this kind of tensor of the embedding or the LM head is not supported"),
)


def end_tensors(names: Iterable[str]) -> dict[EndKey, str]:
    """The tensors of the two ends; the others are left out.

    Raises:
        AdapterError: a name is not understood, or two mean the same.
    """
    found: dict[EndKey, str] = {}
    for name in giving_way(sorted(names)):
        key = _parse(name)
        if key is None:
            continue
        if key in found:
            message = f"tensors {shown(found[key])} and {shown(name)} mean the same"
            raise AdapterError("tensor_unknown", message)
        found[key] = name
    return found


def _parse(name: str) -> EndKey | None:
    plain = plain_name(name)
    for end, module in enumerate(VOCAB_MODULES):
        start = f"{PREFIX}{module}."
        if plain.startswith(start):
            rest = plain.removeprefix(start)
            for pattern, role in _ROLES[end] + _SHARED:
                if re.fullmatch(pattern, rest):
                    return end, role
            reason = next(why for pattern, why in _REFUSED if re.fullmatch(pattern, rest))
            raise AdapterError("tensor_unsupported", f"tensor {shown(name)}: {reason}")
    return None
