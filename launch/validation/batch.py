"""The batch whose outputs are compared: the base and every adapter, prompts of mixed lengths."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from tp_engine.adapters import AdapterRevision

NEW_TOKENS = 32
PROMPT_LENGTHS = (9, 16, 5, 12)
"""Taken in turn; shortened where the model's context is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One sequence a model, the same on every rank."""

    names: tuple[str, ...]
    """Of the models; the base first."""
    digests: tuple[str, ...]
    """Of their revisions; empty for the base."""
    prompts: tuple[list[int], ...]
    """Token ids."""
    new_tokens: int
    """Generated for each."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, prompt and output."""
        return [len(prompt) + self.new_tokens for prompt in self.prompts]

    @classmethod
    def of(
        cls, base: str, adapters: Mapping[str, AdapterRevision], *, vocab: int, positions: int
    ) -> Batch:
        """The batch for a base and its adapters.

        Args:
            base: its name.
            adapters: names and revisions.
            vocab: prompts are random ids below it, the same in every run.
            positions: tokens that a sequence may have.
        """
        draw = random.Random(0)
        new = min(NEW_TOKENS, max(1, positions - 2))
        prompts = []
        for i in range(1 + len(adapters)):
            length = min(PROMPT_LENGTHS[i % len(PROMPT_LENGTHS)], positions - new)
            prompts.append([draw.randrange(vocab) for _ in range(length)])
        return cls(
            names=(base, *adapters),
            digests=("", *(revision.digest for revision in adapters.values())),
            prompts=tuple(prompts),
            new_tokens=new,
        )
