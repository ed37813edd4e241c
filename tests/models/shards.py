"""All ranks of a model in one process, one thread a rank, for tests of the forward pass.

Legend: T tokens of a sequence, V vocabulary, P pages.
"""

import json
import math
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from kernels.attention import AttentionBatch
from kernels.dispatch import ops_for
from kernels.lora import LoraBatch, LoraSegments
from sharding import SITES, RankCut, cut_lora, cut_model, weight_slice
from tp_engine.layers import StepInput
from tp_engine.models import Decoder, ModelSpec
from tp_engine.weights import load_weights
from tp_engine.weights.loader import module_name

BLOCK = 4
CPU = torch.device("cpu")


class ThreadComm:
    """What the decoder uses of `tp_engine.ranks.comm.Comm`, between threads.

    Ranks that do not join every collective, or join with other shapes, fail the test.
    """

    mailboxes = None

    def __init__(self, rank: int, world: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world, self.device = rank, world, CPU
        self._slots, self._barrier = slots, barrier

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum in rank order."""
        self._slots[self.rank] = x
        self._barrier.wait(timeout=20)
        assert len({tuple(part.shape) for part in self._slots}) == 1
        total = self._slots[0].clone()
        for part in self._slots[1:]:
            total += part
        self._barrier.wait(timeout=20)
        return total


@dataclass
class Adapter:
    """A PEFT adapter as tensors: (layer, site) -> A [r, in], B [out, r], scale."""

    modules: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, float]]

    @classmethod
    def read(cls, path: Path, layers: int) -> "Adapter":
        """Read what PEFT saved; no patterns."""
        config = json.loads((path / "adapter_config.json").read_text())
        r, alpha = config["r"], config["lora_alpha"]
        scale = alpha / (math.sqrt(r) if config["use_rslora"] else r)
        tensors = load_file(path / "adapter_model.safetensors")
        modules = {}
        for layer in range(layers):
            for site, name in enumerate(SITES):
                stem = f"base_model.model.{module_name(layer, name)}"
                if f"{stem}.lora_A.weight" in tensors:
                    a = tensors.pop(f"{stem}.lora_A.weight")
                    modules[layer, site] = (a, tensors.pop(f"{stem}.lora_B.weight"), scale)
        assert not tensors
        return cls(modules)

    @property
    def max_rank(self) -> int:
        """Largest r."""
        return max(a.shape[0] for a, _, _ in self.modules.values())


@dataclass
class Arena:
    """Rank-rows and records of a rank's adapters, as `kernels.lora` describes them."""

    dtype: torch.dtype
    rows: list[torch.Tensor] = field(default_factory=list)
    words: list[int] = field(default_factory=list)
    end: int = 0

    def add(self, adapter: Adapter, spec: ModelSpec, cut: RankCut) -> int:
        """Append one adapter's shard; its descriptor number."""
        start, head = len(self.words), 2 * spec.num_layers * len(SITES)
        record = [0] * head
        offsets: list[int] = []
        for (layer, site), (a, b, scale) in sorted(adapter.modules.items()):
            a, b = cut_lora(a, b, weight_slice(spec.dims(), cut.layers[layer], site))
            index = 2 * (layer * len(SITES) + site)
            record[index] = (head + len(offsets)) << 16 | a.shape[0]
            record[index + 1] = struct.unpack("<q", struct.pack("<d", scale))[0]
            offsets += [self._row(row) for row in (*a, *b.T)]
        self.words += record + offsets
        return start

    def _row(self, row: torch.Tensor) -> int:
        data = row.to(self.dtype).clone(memory_format=torch.contiguous_format).view(torch.uint8)
        padded = torch.full((-(-len(data) // 16) * 16 + 16,), 0xFF, dtype=torch.uint8)  # NaN
        padded[: len(data)] = data
        self.rows.append(padded)
        self.end += len(padded)
        return self.end - len(padded)

    def batch(self, offsets: list[int], numbers: list[int], max_rank: int) -> LoraBatch:
        """The step's adapters."""
        return LoraBatch(
            arena=torch.cat(self.rows),
            descriptors=torch.tensor(self.words, dtype=torch.int64),
            segments=LoraSegments(
                offsets=torch.tensor(offsets, dtype=torch.int32),
                descriptors=torch.tensor(numbers, dtype=torch.int64),
                max_rank=max_rank,
            ),
        )


class Shards:
    """A model on `world` ranks; `logits` runs sequences through paged, chunked steps."""

    def __init__(
        self,
        directory: Path,
        world: int,
        *,
        dtype: torch.dtype = torch.float32,
        positions: int = 128,
        deterministic: bool = False,
        **load: Any,
    ) -> None:
        self.spec = ModelSpec.from_directory(directory)
        self.world, self.dtype, self.positions = world, dtype, positions
        self.cuts = cut_model(self.spec.dims(), world)
        self.ops = ops_for(CPU, deterministic=deterministic)
        self.weights = [
            load_weights(self.spec, directory, cut, dtype=dtype, device=CPU, **load)
            for cut in self.cuts
        ]

    def logits(
        self,
        sequences: Sequence[Sequence[int]],
        adapters: Sequence[Adapter | None] | None = None,
        chunks: Sequence[int] = (7, 1, 1, 1000),
        wanted: Callable[[int], list[int]] = lambda rows: list(range(rows)),
    ) -> list[torch.Tensor]:
        """Logits [T, V] of each sequence; step i advances each by `chunks[i]` tokens at most.

        `wanted` picks the rows of a step whose logits are computed; only those are returned.
        """
        slots: list[Any] = [None] * self.world
        barrier = threading.Barrier(self.world)

        def run(rank: int) -> list[list[torch.Tensor]]:
            comm = ThreadComm(rank, self.world, slots, barrier)
            try:
                return self._run(rank, comm, sequences, adapters, chunks, wanted)
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(self.world) as pool:
            ranks = [future.result() for future in [pool.submit(run, r) for r in range(self.world)]]
        return [
            torch.cat([torch.cat(parts) for parts in by_rank], dim=1)
            for by_rank in zip(*ranks, strict=True)
        ]

    def _run(
        self,
        rank: int,
        comm: Any,
        sequences: Sequence[Sequence[int]],
        adapters: Sequence[Adapter | None] | None,
        chunks: Sequence[int],
        wanted: Callable[[int], list[int]],
    ) -> list[list[torch.Tensor]]:
        cut, spec = self.cuts[rank], self.spec
        decoder = Decoder(spec, cut, self.weights[rank], self.ops, comm, self.positions)
        tables = _page_tables(sequences)
        kv = _caches(spec, cut, sum(map(len, tables)) + 1, self.dtype)
        arena, numbers = self._place(cut, adapters or [None] * len(sequences))
        done = [0] * len(sequences)
        out: list[list[torch.Tensor]] = [[] for _ in sequences]
        for chunk in chunks:
            active = [i for i, s in enumerate(sequences) if done[i] < len(s)]
            spans = [(i, done[i], min(done[i] + chunk, len(sequences[i]))) for i in active]
            if not spans:
                break
            lora = None
            if adapters is not None:
                offsets = [0]
                for _, start, stop in spans:
                    offsets.append(offsets[-1] + stop - start)
                top = max((a.max_rank for a in adapters if a is not None), default=0)
                lora = arena.batch(offsets, [numbers[i] for i in active], top)
            step, owners = _step(sequences, spans, tables, kv, lora, wanted)
            logits = decoder.forward(step)
            assert logits.dtype == self.dtype
            logits = logits.float()
            assert logits.shape == (len(owners), cut.vocab.size)
            for i, _, stop in spans:
                out[i].append(logits[[k for k, owner in enumerate(owners) if owner == i]])
                done[i] = stop
        assert done == [len(s) for s in sequences]
        return out

    def _place(
        self, cut: RankCut, adapters: Sequence[Adapter | None]
    ) -> tuple[Arena, dict[int, int]]:
        arena = Arena(self.dtype, rows=[torch.full((16,), 0xFF, dtype=torch.uint8)], end=16)
        arena.words = [-1, -1, -1]  # no record begins at 0
        numbers = {
            i: -1 if adapter is None else arena.add(adapter, self.spec, cut)
            for i, adapter in enumerate(adapters)
        }
        return arena, numbers


def _page_tables(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """Pages of each sequence, in shuffled order; page 0 is nobody's."""
    counts = [-(-len(s) // BLOCK) for s in sequences]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)) + 1
    return [part.tolist() for part in torch.split(order, counts)]


def _caches(
    spec: ModelSpec, cut: RankCut, pages: int, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Views [P, Hkv, block, D] into pages that hold all layers; all memory is NaN at first."""
    sizes = [heads * BLOCK * spec.head_dim for heads in cut.kv_heads]
    memory = torch.full((pages, 2 * sum(sizes)), float("nan"), dtype=dtype)
    caches = []
    at = 0
    for heads, size in zip(cut.kv_heads, sizes, strict=True):
        shape = (pages, heads, BLOCK, spec.head_dim)
        k, v = memory[:, at : at + size], memory[:, at + size : at + 2 * size]
        caches.append((_view(k, shape), _view(v, shape)))
        at += 2 * size
    return tuple(caches)


def _view(flat: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    _, _, block, dim = shape
    strides = (flat.stride(0), block * dim, dim, 1)
    return flat.as_strided(shape, strides, flat.storage_offset())


def _step(
    sequences: Sequence[Sequence[int]],
    spans: list[tuple[int, int, int]],
    tables: list[list[int]],
    kv: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    lora: LoraBatch | None,
    wanted: Callable[[int], list[int]],
) -> tuple[StepInput, list[int]]:
    """One step over (sequence, start, stop) spans, and the sequence of each row with logits."""
    rows = [(i, position) for i, start, stop in spans for position in range(start, stop)]
    offsets = [0]
    for _, start, stop in spans:
        offsets.append(offsets[-1] + stop - start)
    longest = max(len(tables[i]) for i, _, _ in spans)
    padded = [tables[i] + [0] * (longest - len(tables[i])) for i, _, _ in spans]

    def int32(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    attention = AttentionBatch(
        query_offsets=int32(offsets),
        context_lens=int32([stop for _, _, stop in spans]),
        page_table=int32(padded),
        write_pages=int32([tables[i][position // BLOCK] for i, position in rows]),
        write_slots=int32([position % BLOCK for _, position in rows]),
        max_query=max(stop - start for _, start, stop in spans),
        max_context=max(stop for _, _, stop in spans),
    )
    picked = wanted(len(rows))
    step = StepInput(
        tokens=torch.tensor([sequences[i][position] for i, position in rows]),
        positions=torch.tensor([position for _, position in rows]),
        attention=attention,
        logit_rows=torch.tensor(picked, dtype=torch.int64),
        kv=kv,
        lora=lora,
    )
    return step, [rows[k][0] for k in picked]
