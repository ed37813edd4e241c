"""The third check: transformers, PEFT and bitsandbytes, in float64 on the CPU of rank 0.

Weights of 4 bits are expanded by bitsandbytes in float32. The oracle is fed the engine's tokens.

Legend: T rows of a group, V vocabulary.
"""

from __future__ import annotations

import copy
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launch.validation.batch import Batch
from launch.validation.forward import RecordingDecoder
from launch.validation.loading import Loaded
from launch.validation.outputs import groups
from launch.validation.result import Check, Mismatch, Result
from launch.validation.tokens import TokenCheck
from launch.validation.tolerance import TOLERANCES, Tolerance, row_errors
from tp_engine.adapters import AdapterRevision

INSTALL = "--oracle needs transformers, peft, bitsandbytes and accelerate: pip install -e '.[demo]'"


def check_oracle(loaded: Loaded, adapters: Mapping[str, AdapterRevision], batch: Batch) -> Result:
    """Compare logits and greedy tokens; every rank must call it, rank 0 gets the result.

    Raises:
        ValueError: a library that it needs is not installed.
    """
    comm, start = loaded.rank.comm, time.perf_counter()
    tolerance = TOLERANCES[loaded.rank.config.dtype]
    oracle = _Oracle(loaded, adapters) if comm.rank == 0 else None
    decoder = RecordingDecoder(loaded)
    check = Check(name="oracle logits")
    result = Result(checks=[check])
    tokens = TokenCheck("oracle greedy tokens", batch, loaded.tokens, tolerance)
    for group, sequences, revisions in groups(loaded, adapters, batch):
        comm.gather_numbers([1])
        found = decoder.run(sequences, revisions).logits
        if oracle is None or found is None:
            continue
        digests = ["" if revision is None else revision.digest for revision in revisions]
        whole = [oracle.logits(s, d) for s, d in zip(sequences, digests, strict=True)]
        parts = torch.split(found, [len(sequence) for sequence in sequences])
        for i, mine, right in zip(group, parts, whole, strict=True):
            _compare(check, result, batch.names[i], mine, right, tolerance)
        tokens.add(group, torch.cat(whole))
    check.seconds = time.perf_counter() - start
    result.add(tokens.result())
    return result


def _compare(
    check: Check, result: Result, name: str, found: Tensor, right: Tensor, limit: Tolerance
) -> None:
    """Logits [T, V] of one sequence."""
    difference = row_errors(found, right, [len(right)])
    check.tensors += 1
    check.elements += right.numel()
    check.error = max(check.error, difference.largest)
    count, row, col = difference.beyond(limit)
    if count:
        check.mismatches += count
        result.mismatches.append(
            Mismatch(
                check=check.name,
                tensor=f"logits of {name}",
                rank=None,
                index=f"[{row}, {col}]",
                detail=f"{count} of {len(right)} rows are not within tolerance",
            )
        )


class _Oracle:
    """The checkpoint and its adapters as transformers and PEFT run them."""

    def __init__(self, loaded: Loaded, adapters: Mapping[str, AdapterRevision]) -> None:
        config = loaded.rank.config
        with _quiet():
            self._model = _load(loaded.rank.joined.directory, quantize=config.quantize is not None)
            self._apart = _adapted_apart(self._model, adapters)
            self._peft = _add_adapters(self._model, adapters)
            self._model.double()

    @torch.inference_mode()
    def logits(self, tokens: list[int], digest: str) -> Tensor:
        """float64 [T, V] of one sequence under a revision; under the base where it is empty."""
        ids = torch.tensor([tokens])
        if digest in self._apart:
            return self._run(self._apart[digest], ids)
        if self._peft is None:
            return self._run(self._model, ids)
        if not digest:
            with self._peft.disable_adapter():
                return self._run(self._peft, ids)
        self._peft.set_adapter(digest)
        return self._run(self._peft, ids)

    def _run(self, model: Any, ids: Tensor) -> Tensor:
        logits: Tensor = model(ids, use_cache=False).logits[0]
        return logits


def _load(directory: Path, *, quantize: bool) -> Any:
    try:
        import bitsandbytes as bnb
        import transformers
    except ImportError as error:
        raise ValueError(f"{error}; {INSTALL}") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, device_map="cpu", attn_implementation="eager"
    )
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, bnb.nn.Linear4bit):
                setattr(parent, name, _expanded(bnb, child, child.weight.data))
            elif quantize and type(child) is nn.Linear and name != "lm_head":
                packed, state = bnb.functional.quantize_4bit(child.weight.data, quant_type="nf4")
                child.weight.data = _values(bnb, packed, state)
    # A model that is marked as quantised can be neither cast nor adapted in float64.
    model.is_quantized = model.is_loaded_in_4bit = False
    model.quantization_method = None
    return model.eval()


def _expanded(bnb: Any, linear: Any, packed: Tensor) -> nn.Linear:
    """A 4-bit linear as a plain float32 one."""
    plain = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None)
    values = _values(bnb, packed, linear.weight.quant_state)
    plain.weight = nn.Parameter(values, requires_grad=False)
    if linear.bias is not None:
        plain.bias = nn.Parameter(linear.bias.data.float(), requires_grad=False)
    return plain


def _values(bnb: Any, packed: Tensor, state: Any) -> Tensor:
    """float32 values of a 4-bit weight.

    As one row: on the CPU, bitsandbytes 0.50 begins a new block with every row, though blocks run
    over row ends (seen at rows of 96 in blocks of 64).
    """
    shape, state.dtype = state.shape, torch.float32
    state.shape = torch.Size([shape.numel()])
    values: Tensor = bnb.functional.dequantize_4bit(packed, state)
    return values.reshape(shape)


def _adapted_apart(model: Any, adapters: Mapping[str, AdapterRevision]) -> dict[str, Any]:
    """By digest a model of its own for each revision that changes the embedding or the LM head:
    PEFT holds no two of them in one."""
    return {
        revision.digest: _peft()
        .PeftModel.from_pretrained(copy.deepcopy(model), revision.source)
        .double()
        .eval()
        for revision in adapters.values()
        if revision.ends
    }


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"{error}; {INSTALL}") from error
    return peft


def _add_adapters(model: Any, adapters: Mapping[str, AdapterRevision]) -> Any:
    """The model with every revision of the layers alone under its digest; None without any."""
    wrapped = None
    for digest, source in {r.digest: r.source for r in adapters.values() if not r.ends}.items():
        peft = _peft()
        if wrapped is None:
            wrapped = peft.PeftModel.from_pretrained(model, source, adapter_name=digest)
        else:
            wrapped.load_adapter(source, adapter_name=digest)
    return wrapped


@contextmanager
def _quiet() -> Iterator[None]:
    """What the libraries warn of is not about the comparison."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
