"""Runs every case of a workload on all ranks; rank 0 writes what came of it.

    python -m torch.distributed.run --standalone --nproc-per-node N -m tests.distributed.cases \
        WORKLOAD.json RESULTS.jsonl

All ranks make the same `LLM` and the same calls; ranks ≥ 1 follow inside them.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from kernels import ops_for
from kernels.nf4 import NF4Weight, Weight
from sharding import weight_slice
from tests.distributed.room import choose_pages
from tests.distributed.workload import Answer, Ask, Case, RankReport, Result
from tp_engine import LLM
from tp_engine.messages import Failed, Submit
from tp_engine.rank import Rank
from tp_engine.steps.plan import PlanKind

WORLD = int(os.environ["WORLD_SIZE"])


def main(workload: str, results: str) -> None:
    """Run the cases of this world size, in order."""
    cases = msgspec.json.decode(Path(workload).read_bytes(), type=list[Case])
    with open(results if os.environ["RANK"] == "0" else os.devnull, "wb") as file:
        for case in cases:
            if WORLD in case.worlds:
                run_case(case, file)


def run_case(case: Case, file: BinaryIO) -> None:
    """Load, ask, inspect; on rank 0 write the result."""
    started = time.monotonic()
    options, at_once = dict(case.options), 0
    if case.room is not None:
        options["num_pages"], at_once = choose_pages(case, WORLD)
    with LLM(case.model, lora=case.adapters, device="cpu", **options) as llm:
        if case.depth is not None and llm.engine is not None:
            llm.engine._depth = case.depth  # of its own accord it overlaps steps on GPUs only
        gauges = run_and_abort(llm, case) if case.aborted else ({}, {})
        rounds = [run_round(llm, asks) for asks in case.rounds]
        reports = gather(report(llm.rank, case))
        engine = llm.engine
        if engine is not None:
            stats = engine.stats()
            result = Result(
                name=case.name,
                rounds=rounds,
                counters=stats.counters,
                gauges=stats.gauges,
                gauges_running=gauges[0],
                gauges_aborted=gauges[1],
                faults=engine.check_integrity(),
                pinned=sum(resident.users for resident in engine.residency.residents),
                num_pages=llm.rank.num_pages,
                pages_at_once=at_once,
                ranks=reports,
                seconds=time.monotonic() - started,
            )
            file.write(msgspec.json.encode(result) + b"\n")
            file.flush()
            print(f"{case.name}: {result.seconds:.1f} s", flush=True)
    if WORLD > 1:
        dist.destroy_process_group(llm.rank.comm.control_group)


def run_round(llm: LLM, asks: list[Ask]) -> list[Answer]:
    """One batch; empty on ranks that only follow."""
    completions = llm.generate(
        [ask.prompt for ask in asks],
        [ask.params for ask in asks],
        model=[ask.model for ask in asks],
    )
    return [
        Answer(
            tokens=done.tokens,
            finish_reason=done.finish_reason,
            cached_tokens=done.cached_tokens,
            logprobs=done.logprobs,
        )
        for done in completions or []
    ]


def run_and_abort(llm: LLM, case: Case) -> tuple[dict[str, float], dict[str, float]]:
    """Start requests, abort them all mid-way; the gauges before and after the aborts."""
    engine = llm.engine
    if engine is None:
        llm.generate([])
        return {}, {}
    for i, ask in enumerate(case.aborted):
        resolved = llm.registry.resolve(ask.model or case.model)
        message = Submit(
            request_id=f"aborted {i}", model=resolved.name, prompt=ask.prompt, params=ask.params
        )
        engine.submit(message, resolved.digest)
    for _ in range(case.abort_after):
        assert not any(isinstance(output, Failed) for output in engine.step())
    running = engine.stats().gauges
    for i in range(len(case.aborted)):
        engine.abort(f"aborted {i}")
    aborted = engine.stats().gauges
    engine.control(PlanKind.RETURN)
    return running, aborted


def gather(mine: RankReport) -> list[RankReport]:
    """Every rank's report, in rank order, on rank 0; empty elsewhere."""
    if WORLD == 1:
        return [mine]
    parts: list[RankReport | None] = [None] * WORLD
    dist.all_gather_object(parts, mine)
    return [part for part in parts if part is not None]


def report(rank: Rank, case: Case) -> RankReport:
    """What this rank holds and has done."""
    weights = rank.weights
    norms = [weights.norm]
    packed = [weights.embedding, *tensors_of(weights.lm_head)]
    for layer in weights.layers:
        norms += [layer.input_norm, layer.post_norm]
        norms += [norm for norm in (layer.q_norm, layer.k_norm) if norm is not None]
        for weight in (*layer.qkv, layer.o, *layer.gate_up, layer.down):
            packed += tensors_of(weight)
        biases = (layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias)
        packed += [bias for bias in biases if bias is not None]
    return RankReport(
        forward_calls=rank.worker.runner.forward_calls,
        norm_bytes=storage_bytes(norms),
        weight_bytes=storage_bytes(packed),
        checksums=dict(checksums(rank)) if case.checksums else {},
    )


def tensors_of(weight: Weight) -> list[Tensor]:
    """The tensors behind a weight, kept copies included."""
    if not isinstance(weight, NF4Weight):
        return [weight.weight, *([] if weight.fast is None else [weight.fast])]
    kept = [] if weight.dense is None else [weight.dense]
    return [weight.codes, weight.absmax, weight.phase, *kept]


def storage_bytes(tensors: list[Tensor]) -> int:
    """Memory behind some tensors, shared memory once."""
    opaque = [t for t in tensors if t.is_mkldnn]
    plain = [t.untyped_storage() for t in tensors if not t.is_mkldnn]
    return sum({s.data_ptr(): s.nbytes() for s in plain}.values()) + sum(t.nbytes for t in opaque)


def checksums(rank: Rank) -> Iterator[tuple[str, str]]:
    """(layer.site, SHA-256 of the de-quantised slice) of every linear weight."""
    ops = ops_for(torch.device("cpu"))
    for index, layer in enumerate(rank.weights.layers):
        cut = rank.cuts[rank.comm.rank].layers[index]
        groups = (
            (layer.qkv, ("q_proj", "k_proj", "v_proj")),
            ((layer.o,), ("o_proj",)),
            (layer.gate_up, ("gate_proj", "up_proj")),
            ((layer.down,), ("down_proj",)),
        )
        for weights, sites in groups:
            whole = torch.cat(
                [
                    ops.dequantize(w, torch.float32) if isinstance(w, NF4Weight) else w.weight
                    for w in weights
                ]
            )
            sizes = [weight_slice(rank.dims, cut, site).rows.size for site in sites]
            for site, part in zip(sites, whole.split(sizes), strict=True):
                yield f"{index}.{site}", sha256(part)


def sha256(values: Tensor) -> str:
    """Of a float32 matrix's bytes, row by row."""
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
