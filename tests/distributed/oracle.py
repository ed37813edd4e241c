"""transformers and PEFT on the same de-quantised weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor

from tests.distributed.agreement import Agreement, compare
from tests.distributed.workload import Answer, Ask
from tests.helpers.tiny_models import load_oracle

Key = tuple[str | None, tuple[int, ...], tuple[int, ...]]
"""Adapter, prompt, output."""


def _with_adapters(base: Any, adapters: Mapping[str, str]) -> Any:
    model = base
    with warnings.catch_warnings():
        # PEFT warns of adapters that could not be merged or saved again, which nobody does here.
        warnings.simplefilter("ignore")
        for name, path in adapters.items():
            if model is base:
                model = peft.PeftModel.from_pretrained(base, path, adapter_name=name)
            else:
                model.load_adapter(path, adapter_name=name)
    return model


class Oracle:
    """One base and its adapters, unmerged. Remembers what it has compared."""

    def __init__(
        self, model: str, adapters: Mapping[str, str], dtype: torch.dtype, *, apart: bool = False
    ) -> None:
        """``apart``: a model an adapter, for those that PEFT cannot hold beside each other."""
        base = copy.deepcopy(load_oracle(Path(model)))
        self._model: Any = base if apart else _with_adapters(base, adapters)
        self._apart: dict[str, Any] = {}
        for name, path in adapters.items() if apart else ():
            own = _with_adapters(copy.deepcopy(base), {name: path})
            self._apart[name] = own.to(dtype).eval()
        self._adapted = self._model is not base
        self._model.to(dtype).eval()
        self._known: dict[Key, Agreement] = {}

    def compare(self, asks: Sequence[Ask], answers: Sequence[Answer]) -> list[Agreement]:
        """Compare greedy answers with one pass for all of a model and a length."""
        keys = [
            (ask.model, tuple(ask.prompt), tuple(answer.tokens))
            for ask, answer in zip(asks, answers, strict=True)
        ]
        batches: dict[tuple[str | None, int, int], list[Key]] = {}
        for key in dict.fromkeys(keys):
            if key not in self._known:
                batches.setdefault((key[0], len(key[1]), len(key[2])), []).append(key)
        for batch in batches.values():
            for key, logits in zip(batch, self._logits(batch), strict=True):
                self._known[key] = compare(key[2], logits)
        return [self._known[key] for key in keys]

    @torch.inference_mode()
    def _logits(self, batch: Sequence[Key]) -> Tensor:
        """Logits [B, T, V] of outputs of T tokens: row t follows the prompt and ``output[:t]``."""
        model, _, output = batch[0]
        oracle = self._apart.get(model or "", self._model)
        if model is not None and oracle is self._model:
            oracle.set_adapter(model)
        plain = model is None and self._adapted
        with self._model.disable_adapter() if plain else nullcontext():
            tokens = torch.tensor([[*prompt, *tokens[:-1]] for _, prompt, tokens in batch])
            logits: Tensor = oracle(tokens, use_cache=False, logits_to_keep=len(output)).logits
        return logits.double()
