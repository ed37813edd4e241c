"""Names of an adapter's tensors: each one is half of a module's pair, or refused by name.

Format, as PEFT writes it: ``base_model.model.`` + module + ``.lora_A.weight`` [r, in] or
``.lora_B.weight`` [out, r]. Two habits of other writers are understood: the adapter name
``default`` before ``weight``, and ``_orig_mod`` parts, which torch.compile puts in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from tp_engine.adapters.errors import AdapterError, shown

Side = Literal["A", "B"]

PREFIX: Final = "base_model.model."
_PAIR: Final = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
_SPECIAL: Final = (
    (r"\.lora_magnitude_vector\b", "DoRA magnitudes are not supported"),
    (r"\.lora_[AB]\.(.+\.)?bias$", "biases of LoRA layers (lora_bias) are not supported"),
    (r"\.lora_embedding_[AB]\b", "LoRA on embeddings is not supported"),
    (r"\.(token_adapter|trainable_tokens)", "replaced token rows are not supported"),
    (r"\.experts\b.*\.lora_[AB]\.", "LoRA on experts is not supported"),
    (r"\.(lm_head|embed_tokens)\.lora_[AB]\.", "LoRA on the head or embedding is not supported"),
)
"""What is known of tensors of other kinds, tried first."""
_OTHER: Final = (
    (r"\.lora_[AB]\.[^.]+\.weight$", "the only adapter name understood is 'default'"),
    (r"\.lora_", "this kind of LoRA tensor is not supported"),
    (r"\.bias$", "trained biases of the base are not supported"),
    (r"\.weight$", "whole replaced modules (modules_to_save) are not supported"),
)
"""Of tensors whose name is not that of a pair's half."""


def pair_tensors(
    names: Iterable[str], modules: Mapping[str, tuple[int, int]]
) -> dict[tuple[int, int], dict[Side, str]]:
    """Sort tensors by the module they belong to.

    Args:
        names: of the tensors in the file.
        modules: name of every module of the base that LoRA may change -> (layer, site).

    Raises:
        AdapterError: a name is not understood or names no module of the base, two names mean the
            same tensor, or a half of a pair lacks.
    """
    pairs: dict[tuple[int, int], dict[Side, str]] = {}
    for name in sorted(names):
        module, side = _parse(name, modules)
        pair = pairs.setdefault(modules[module], {})
        if side in pair:
            message = (
                f"tensors {shown(pair[side])} and {shown(name)} are both lora_{side} of {module}"
            )
            raise AdapterError("tensor_unknown", message)
        pair[side] = name
    for pair in pairs.values():
        if len(pair) == 1:
            (side, name), *_ = pair.items()
            other = "B" if side == "A" else "A"
            raise AdapterError(
                "tensor_missing", f"tensor {shown(name)} has no lora_{other} beside it"
            )
    return dict(sorted(pairs.items()))


def plain_name(name: str) -> str:
    """A tensor's name without what torch.compile puts in."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _parse(name: str, modules: Mapping[str, tuple[int, int]]) -> tuple[str, Side]:
    """Module and side of a tensor."""
    plain = plain_name(name)
    match = _PAIR.fullmatch(plain.removeprefix(PREFIX))
    if match and plain.startswith(PREFIX) and match["module"] in modules:
        return match["module"], "A" if match["side"] == "A" else "B"
    raise _explain(name, plain, match["module"] if match else None)


def _explain(name: str, plain: str, module: str | None) -> AdapterError:
    """Why a tensor is refused; ``module`` if its name is otherwise that of a pair's half."""
    for pattern, reason in _SPECIAL if module is not None else _SPECIAL + _OTHER:
        if re.search(pattern, f".{plain}"):
            return AdapterError("tensor_unsupported", f"tensor {shown(name)}: {reason}")
    if module is None:
        reason = f"allowed are {PREFIX}MODULE.lora_A.weight and .lora_B.weight"
    elif not plain.startswith(PREFIX):
        reason = f"the name must begin with {PREFIX!r}"
    else:
        reason = f"the base has no module {shown(module)} that LoRA may change"
    return AdapterError("tensor_unknown", f"tensor {shown(name)}: {reason}")
