"""Names of an adapter's tensors: each one has a role in a module, or is refused by name.

Format, as PEFT writes it: ``base_model.model.`` + module + ``.lora_A.weight`` [r, in],
``.lora_B.weight`` [out, r], ``.lora_B.bias`` [out] (``lora_bias``) or ``.lora_magnitude_vector``
[out] (``use_dora``). Two habits of other writers are understood: the adapter name ``default``
where PEFT has it in memory, and ``_orig_mod`` parts, which torch.compile puts in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from tp_engine.adapters.errors import AdapterError, shown
from tp_engine.adapters.targets import VOCAB_MODULES
from tp_engine.interpreter import giving_way

Role = Literal["A", "B", "bias", "magnitude"]
"""Of a tensor in its module."""

PREFIX: Final = "base_model.model."
_ENDS: Final = " and ".join(f"{PREFIX}{module}" for module in VOCAB_MODULES)
"""Tensors under these are sorted by `tp_engine.adapters.ends.keys`, and never come here."""
_ROLES: Final[tuple[tuple[re.Pattern[str], Role], ...]] = (
    (re.compile(r"(?P<module>.+)\.lora_A(\.default)?\.weight"), "A"),
    (re.compile(r"(?P<module>.+)\.lora_B(\.default)?\.weight"), "B"),
    (re.compile(r"(?P<module>.+)\.lora_B(\.default)?\.bias"), "bias"),
    (re.compile(r"(?P<module>.+)\.lora_magnitude_vector(\.default)?(\.weight)?"), "magnitude"),
)
_SPECIAL: Final = (
    (r"\.lora_A\.(.+\.)?bias$", "biases of lora_A are not supported"),
    (r"\.lora_embedding_[AB]\b", f"the embedding's tensors are looked for under {_ENDS}"),
    (r"\.(token_adapter|trainable_tokens)", f"replaced token rows are looked for under {_ENDS}"),
    (r"\.experts\b.*\.lora_[AB]\.", "LoRA on experts is not supported"),
    (r"\.(lm_head|embed_tokens)\.lora_(magnitude|[AB]\.)", f"it is looked for under {_ENDS}"),
)
"""What is known of tensors of other kinds, tried first."""
_OTHER: Final = (
    (
        r"\.lora_([AB]|magnitude_vector)\.[^.]+(\.weight|\.bias)?$",
        "the only adapter name understood is 'default'",
    ),
    (r"\.lora_", "this kind of LoRA tensor is not supported"),
    (r"\.bias$", "trained biases of the base are not supported"),
    (r"\.weight$", f"whole modules (modules_to_save) are replaced under {_ENDS} alone"),
)
"""Of tensors whose name is none of the above."""


def pair_tensors(
    names: Iterable[str], modules: Mapping[str, tuple[int, int]]
) -> dict[tuple[int, int], dict[Role, str]]:
    """Sort tensors by the module they belong to.

    Args:
        names: of the tensors in the file.
        modules: name of every module of the base that LoRA may change -> (layer, site).

    Raises:
        AdapterError: a name is not understood or names no module of the base, two names mean the
            same tensor, or a half of a pair lacks.
    """
    pairs: dict[tuple[int, int], dict[Role, str]] = {}
    for name in giving_way(sorted(names)):
        module, role = _parse(name, modules)
        pair = pairs.setdefault(modules[module], {})
        if role in pair:
            message = f"tensors {shown(pair[role])} and {shown(name)} are both {role} of {module}"
            raise AdapterError("tensor_unknown", message)
        pair[role] = name
    for pair in pairs.values():
        for half in sorted({"A", "B"} - pair.keys()):
            name = shown(next(iter(pair.values())))
            raise AdapterError("tensor_missing", f"tensor {name} has no lora_{half} beside it")
    return dict(sorted(pairs.items()))


def plain_name(name: str) -> str:
    """A tensor's name without what torch.compile puts in."""
    if "_orig_mod" not in name:
        return name
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def check_roles(names: Mapping[Role, str], module: str, *, dora: bool, bias: bool) -> None:
    """A module's tensors beside its pair must be those that the config asks for.

    Raises:
        AdapterError: one is missing, or not asked for.
    """
    asked: dict[Role, tuple[bool, str]] = {
        "magnitude": (dora, "use_dora"),
        "bias": (bias, "lora_bias"),
    }
    for role, (on, field) in asked.items():
        if on and role not in names:
            reason = f"{field} is true, but {module} has no {role} (beside {shown(names['A'])})"
            raise AdapterError("tensor_missing", f"adapter_config.json: {reason}")
        if role in names and not on:
            reason = f"{field} is not true in adapter_config.json"
            raise AdapterError("tensor_unknown", f"tensor {shown(names[role])}: {reason}")


def _parse(name: str, modules: Mapping[str, tuple[int, int]]) -> tuple[str, Role]:
    """Module and role of a tensor."""
    plain = plain_name(name)
    named = None
    for pattern, role in _ROLES:
        if match := pattern.fullmatch(plain.removeprefix(PREFIX)):
            named = match["module"]
            if plain.startswith(PREFIX) and named in modules:
                return named, role
    raise _explain(name, plain, named)


def _explain(name: str, plain: str, module: str | None) -> AdapterError:
    """Why a tensor is refused; ``module`` if its name ends as one with a role does."""
    for pattern, reason in _SPECIAL if module is not None else _SPECIAL + _OTHER:
        if re.search(pattern, f".{plain}"):
            return AdapterError("tensor_unsupported", f"tensor {shown(name)}: {reason}")
    if module is None:
        endings = "lora_A.weight, .lora_B.weight, .lora_B.bias and .lora_magnitude_vector"
        reason = f"allowed are {PREFIX}MODULE.{endings}"
    elif not plain.startswith(PREFIX):
        reason = f"the name must begin with {PREFIX!r}"
    else:
        reason = f"the base has no module {shown(module)} that LoRA may change"
    return AdapterError("tensor_unknown", f"tensor {shown(name)}: {reason}")
