"""Adapters of the embedding and the LM head in an engine: together as alone, on either device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sharding import TOP, ModelDims
from tests.engine.test_rotation import revision, write_model
from tp_engine import LLM, SamplingParams
from tp_engine.adapters import AdapterRevision, LoraModule, pack_adapter
from tp_engine.adapters.ends.replaced import EMBEDDING, HEAD, Replaced
from tp_engine.messages import Failed, Submit
from tp_engine.requests.completion import Completion, OpenPrompt

KINDS = ("plain", "head", "embedding", "whole", "rows", "everything")
NEAR_TIE = 0.02
NEW = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("ends") / "model")


def adapter(dims: ModelDims, kind: str) -> AdapterRevision:
    """A plain adapter with changes of the ends, of the size of the base's own numbers."""
    number = KINDS.index(kind)
    random = torch.Generator().manual_seed(100 + number)
    size = (2.0 / dims.hidden) ** 0.5

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    every = kind == "everything"
    modules = dict(revision(dims, number).modules)
    replaced = {}
    if every or kind == "embedding":
        a, b = numbers(5, dims.vocab), numbers(dims.hidden, 5) * size
        modules[TOP, EMBEDDING] = LoraModule(a=a, b=b, scale=0.5)
    if every or kind == "head":
        a, b = numbers(9, dims.hidden) * size, numbers(dims.vocab, 9) * 0.5
        modules[TOP, HEAD] = LoraModule(a=a, b=b, scale=0.5)
    for end in (EMBEDDING, HEAD):
        whole = numbers(dims.vocab, dims.hidden) * size if every or kind == "whole" else None
        ids = torch.arange(3, dims.vocab, 7) if every or kind == "rows" else None
        rows = None if ids is None else numbers(len(ids), dims.hidden) * size
        if whole is not None or ids is not None:
            replaced[end] = Replaced(whole=whole, ids=ids, rows=rows)
    return AdapterRevision(
        digest=f"{number + 1:064x}",
        source="random",
        modules=modules,
        expected=len(modules),
        replaced=replaced,
    )


def serve(model: Path, device: str, **options: Any) -> LLM:
    """An engine with an adapter of every kind."""
    limits = {"max_model_len": 128, "max_num_seqs": 16, "num_pages": 1500}
    llm = LLM(str(model), device=device, enable_prefix_caching=False, **limits, **options)
    assert llm.engine is not None
    rank = llm.rank
    dtype = getattr(torch, rank.config.dtype)
    for kind in KINDS:
        made = adapter(rank.dims, kind)
        images = pack_adapter(made, rank.cuts, rank.dims, dtype, rank.layout.page_bytes)
        llm.engine.roster.register(kind, made, images)
    return llm


def ask(llm: LLM, numbers: Sequence[int]) -> list[Completion]:
    """Some requests at once; number n is for kind n, or for the base."""
    engine = llm.engine
    assert engine is not None
    opened = {}
    for number in numbers:
        kind = number % (len(KINDS) + 1)
        prompt = [(number * 131 + i * 17) % 990 + 5 for i in range(4 + 3 * number)]
        params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=2)
        message = Submit(request_id=str(number), model="", prompt=prompt, params=params)
        opened[str(number)] = OpenPrompt(message, None)
        engine.submit(message, f"{kind + 1:064x}" if kind < len(KINDS) else "")
    while engine.requests:
        for output in engine.step():
            assert not isinstance(output, Failed), output
            opened[output.request_id].take(output)
    return [each.completion() for each in opened.values()]


EVERY = range(2 * (len(KINDS) + 1))


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Completion]:
    """Each request by itself, on the CPU."""
    llm = serve(model, "cpu", dtype="float32")
    found = [each for number in EVERY for each in ask(llm, [number])]
    llm.close()
    return found


def assert_close(found: Sequence[Completion], truth: Sequence[Completion], near: float) -> None:
    ties = 0
    for mine, right in zip(found, truth, strict=True):
        assert right.logprobs is not None
        for token, other, report in zip(mine.tokens, right.tokens, right.logprobs, strict=True):
            if token != other:
                best, second = report.top_logprobs
                assert best - second < near
                ties += 1
                break
    assert ties <= len(truth) * (1 if near == NEAR_TIE else 7) // 10


def test_each_kind_has_tokens_of_its_own(alone: list[Completion]) -> None:
    assert len({tuple(each.tokens) for each in alone}) == len(alone)


def test_together_they_give_what_they_give_alone(model: Path, alone: list[Completion]) -> None:
    llm = serve(model, "cpu", dtype="float32", max_num_batched_tokens=48)
    assert_close(ask(llm, EVERY), alone, NEAR_TIE)
    llm.close()


def test_deterministic_engines_give_the_same_bits(model: Path) -> None:
    llm = serve(model, "cpu", dtype="float32", deterministic=True, max_num_batched_tokens=48)
    together = ask(llm, EVERY)
    for number in EVERY:
        (single,) = ask(llm, [number])
        assert single.tokens == together[number].tokens
        assert single.logprobs == together[number].logprobs
    llm.close()


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "near"), [("float32", NEAR_TIE), ("bfloat16", 0.15)])
def test_a_gpu_gives_the_tokens_of_the_cpu(
    model: Path, alone: list[Completion], dtype: str, near: float
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    llm = serve(model, "cuda", dtype=dtype)
    for _ in range(2):  # the second time steps without such adapters come from graphs
        assert_close(ask(llm, EVERY), alone, near)
    llm.close()
