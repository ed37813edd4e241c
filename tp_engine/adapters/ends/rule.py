"""Which changes of the two ends a config asks for, given the base, as PEFT reads it.

Source: the behaviour of PEFT 0.21 with ``target_modules``, ``modules_to_save``,
``trainable_token_indices`` and ``ensure_weight_tying``, on bases whose head is the embedding (tied)
and on others. What PEFT itself cannot run is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from sharding import VOCAB_SITES
from tp_engine.adapters.ends.replaced import EMBEDDING, HEAD
from tp_engine.adapters.ends.settings import EndSettings
from tp_engine.adapters.errors import AdapterError
from tp_engine.adapters.fields import field_error
from tp_engine.adapters.patterns import match_start, matches_whole
from tp_engine.adapters.targets import VOCAB_MODULES, TargetRule


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRule:
    """What is asked of one end."""

    lora: bool | None
    """Whether it has a LoRA pair; None: the config does not say, the tensors do."""
    saved: bool
    """Whether a whole matrix takes its place."""
    ids: tuple[int, ...] | None
    """Tokens whose rows are replaced, in the order of its own tensor; None: it has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRules:
    """What is asked of both ends."""

    ends: tuple[EndRule, EndRule]
    """Of the embedding and of the head."""
    tied_lora: bool = False
    """The head's pair is the embedding's, the factors exchanged."""
    tied_saved: bool = False
    """The head's whole matrix is the embedding's."""
    tied_rows: bool = False
    """The head's replaced rows are the embedding's."""


def end_rules(settings: EndSettings, targets: TargetRule, *, tied: bool) -> EndRules:
    """Say what the config asks for.

    Args:
        tied: whether the base's head is its embedding.

    Raises:
        AdapterError: two fields ask for what PEFT cannot run together.
    """
    ties = tied and settings.tie
    tied_saved = ties and any(_is_end(name) for name in settings.saved)
    tied_lora = ties and not tied_saved and _targets_an_end(targets)
    excluded = _tied_names(settings.saved) if tied_saved else settings.saved
    tied_rows = _tied_rows(settings, tied=tied)
    ends = []
    for end, module in enumerate(VOCAB_MODULES):
        lora = True if tied_lora else _lora(targets, excluded, module)
        saved = tied_saved or any(module.endswith(name) for name in settings.saved)
        from_embedding = tied_rows and end == HEAD
        ids = None if from_embedding else settings.rows.get(end)
        if lora and saved:
            raise _refused("modules_to_save", [*settings.saved], "target_modules", module)
        if (saved and (ids or from_embedding)) or (lora and ids):
            other = "modules_to_save" if saved else "target_modules"
            raise _refused("trainable_token_indices", _shown(settings), other, module)
        ends.append(EndRule(lora=lora, saved=saved, ids=ids))
    return EndRules(
        ends=(ends[EMBEDDING], ends[HEAD]),
        tied_lora=tied_lora,
        tied_saved=tied_saved,
        tied_rows=tied_rows,
    )


def _refused(name: str, value: object, other: str, module: str) -> AdapterError:
    """For two ways of changing the same matrix."""
    reason = f"{other} covers {module} too; one of the two is allowed"
    return field_error(name, value, reason, "config_unsupported")


def _shown(settings: EndSettings) -> dict[str, list[int]]:
    return {VOCAB_SITES[end]: [*ids] for end, ids in settings.rows.items()}


def _lora(targets: TargetRule, excluded: tuple[str, ...], module: str) -> bool | None:
    if any(match_start(rf"(^|.*\.){name}($|\..*)", module) for name in excluded):
        return False
    return None if targets.targets is None else targets.covers(module)


def _is_end(name: str) -> bool:
    return name.rpartition(".")[2] in VOCAB_SITES


def _targets_an_end(targets: TargetRule) -> bool:
    """PEFT compares a regular expression with the last parts of the names alone."""
    if isinstance(targets.targets, str):
        return any(matches_whole(targets.targets, name) for name in VOCAB_SITES)
    return any(_is_end(name) for name in targets.targets or ())


def _tied_names(saved: tuple[str, ...]) -> tuple[str, ...]:
    """PEFT saves the embedding in the head's place."""
    names = [*saved, VOCAB_MODULES[EMBEDDING]]
    of_head = [
        name for name in names if match_start(rf"(^|.*\.){name}($|\..*)", VOCAB_MODULES[HEAD])
    ]
    if of_head:
        names.remove(of_head[0])
    return tuple(names)


def _tied_rows(settings: EndSettings, *, tied: bool) -> bool:
    """Whether the head takes the embedding's rows: yes, unless the config names others for it."""
    if not tied or EMBEDDING not in settings.rows:
        return False
    if settings.rows.get(HEAD, settings.rows[EMBEDDING]) == settings.rows[EMBEDDING]:
        return True
    if settings.tie:
        allowed = "equal lists, as the base ties the two and ensure_weight_tying is true"
        raise field_error("trainable_token_indices", _shown(settings), allowed)
    return False
