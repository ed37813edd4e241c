"""A validating rank from its options to its exit."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from launch.preflight import ensure_torchrun_environment
from launch.validation.batch import Batch
from launch.validation.entry import Entry
from launch.validation.inventory import base_entries
from launch.validation.inventory_lora import adapter_entries
from launch.validation.loading import Loaded, load
from launch.validation.options import ValidateOptions, draw_seed
from launch.validation.oracle import check_oracle
from launch.validation.outputs import check_outputs, run_check
from launch.validation.report import Report
from launch.validation.result import Result
from launch.validation.self_test import SelfTest, run_self_test
from launch.validation.tensors import Parts, check_tensors
from launch.validation.whole import WholeSource
from sharding import Checkpoint
from tp_engine.adapters import AdapterRevision
from tp_engine.logs import setup_logging
from tp_engine.rank import read_adapters
from tp_engine.ranks.comm import Comm
from tp_engine.ranks.join import join

log = logging.getLogger(__name__)


def run_rank(options: ValidateOptions) -> int:
    """Check as the rank that the environment says; the exit code, equal on all ranks.

    0 when nothing differs, 1 when something does or the model cannot be loaded.
    """
    rank = int(os.environ.get("RANK", "0"))
    # All ranks read the same files, so one of them is enough to warn of them.
    setup_logging("error" if rank else "warning", "text", rank)
    try:
        ensure_torchrun_environment(os.environ)
        ok = _validate(options)
    except ValueError as error:
        log.error("%s", error)
        return 1
    return 0 if ok else 1


def _validate(options: ValidateOptions) -> bool:
    start = time.perf_counter()
    joined = join(options.engine)
    adapters: dict[str, AdapterRevision] = {}  # on every rank: it compares with what files hold
    read_adapters(joined, adapters.__setitem__)
    positions = joined.config.max_model_len
    assert positions is not None
    base = joined.config.base_names[0]
    vocab = joined.spec.vocab_size
    batch = Batch.of(base, adapters, vocab=vocab, positions=positions)
    loaded = load(joined, adapters, batch)
    ran = run_check(f"load and run at world size {joined.comm.world}", batch, start)
    comm = loaded.rank.comm
    with Checkpoint.open(joined.directory) as checkpoint:
        entries = _entries(loaded, adapters, checkpoint)
        result = Result(checks=[ran])
        tensors, parts = check_tensors(comm, entries)
        result.add(tensors)
        result.add(_check_outputs(options, loaded, adapters, batch))
        test = _self_test(options, comm, entries, parts)
    report = Report(
        rank=loaded.rank,
        adapters=adapters,
        result=result,
        self_test=test,
        seconds=time.perf_counter() - start,
    )
    if comm.rank == 0:
        _publish(report, options.json)
    # Only rank 0 knows what the outputs were like.
    return comm.gather_numbers([int(report.ok)])[0] == [1]


def _entries(
    loaded: Loaded, adapters: Mapping[str, AdapterRevision], checkpoint: Checkpoint
) -> list[Entry]:
    rank = loaded.rank
    source = WholeSource(
        checkpoint,
        getattr(torch, rank.config.dtype),
        quantize=rank.config.quantize is not None,
    )
    cut, tied = rank.cuts[rank.comm.rank], rank.joined.spec.tie_word_embeddings
    entries = base_entries(rank.weights, cut, rank.dims, source, tied=tied)
    return entries + adapter_entries(rank, adapters, loaded.descriptors, source)


def _check_outputs(
    options: ValidateOptions, loaded: Loaded, adapters: Mapping[str, AdapterRevision], batch: Batch
) -> Result:
    """At world size 1 there is nothing to compare with but the oracle."""
    result = Result()
    if loaded.rank.comm.world > 1:
        result.add(check_outputs(loaded, adapters, batch))
    if options.oracle:
        result.add(check_oracle(loaded, adapters, batch))
    return result


def _self_test(
    options: ValidateOptions, comm: Comm, entries: list[Entry], parts: Parts
) -> SelfTest | None:
    if not options.self_test:
        return None
    (seed, *_), *_ = comm.gather_numbers([draw_seed() if options.seed is None else options.seed])
    return run_self_test(comm, entries, parts, seed=seed, rounds=options.rounds)


def _publish(report: Report, path: str | None) -> None:
    print(report.text(), flush=True)
    line = report.line()
    print(line, flush=True)
    if path is not None:
        Path(path).write_text(line + "\n", encoding="utf-8")
