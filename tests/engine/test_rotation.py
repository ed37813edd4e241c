"""More adapters than the arena holds come and go; each request gets the tokens it gets alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import save_file

from sharding import SITES, ModelDims
from tp_engine import LLM, SamplingParams
from tp_engine.adapters import AdapterRevision, LoraModule, pack_adapter
from tp_engine.messages import Failed, Submit
from tp_engine.requests.completion import OpenPrompt
from tp_engine.tiers.copies import Copies

ADAPTERS, RESIDENT, REQUESTS, BATCH = 12, 4, 72, 9
NEAR_TIE = 0.02
"""Two best log-probabilities this close may be told apart either way."""
BFLOAT16 = ("bfloat16", 128, 0.15)
"""Heads of 128 take the Hopper kernel; logits are rounded to 1/64 and more."""
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}


def write_model(directory: Path, head_dim: int = 32) -> Path:
    """A Llama whose logits spread over several units."""
    hidden, inner, vocab = (SIZES[n] for n in ("hidden_size", "intermediate_size", "vocab_size"))
    q, kv = (head_dim * SIZES[n] for n in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for layer in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", q, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, q),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            shapes[f"{at}{name}.weight"] = (rows, columns)
    random = torch.Generator().manual_seed(5)
    tensors = {
        name: torch.randn(shape, generator=random) * (2.0 / shape[1]) ** 0.5
        for name, shape in shapes.items()
    }
    norms = ["model.norm.weight"] + [
        f"model.layers.{layer}.{name}.weight"
        for layer in range(SIZES["num_hidden_layers"])
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    tensors |= {name: torch.ones(hidden) for name in norms}
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    rest = {"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
    sizes = {**SIZES, "head_dim": head_dim}
    (directory / "config.json").write_text(json.dumps({**kind, **rest, **sizes}))
    return directory


def revision(dims: ModelDims, number: int) -> AdapterRevision:
    """An adapter whose delta is of the size of the weights; ranks are 2 to 24."""
    random = torch.Generator().manual_seed(number)
    rank = (2, 8, 16, 24)[number % 4]
    q, kv = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    inner = dims.intermediate
    widths = {
        **{"q_proj": (dims.hidden, q), "k_proj": (dims.hidden, kv), "v_proj": (dims.hidden, kv)},
        **{"o_proj": (q, dims.hidden), "gate_proj": (dims.hidden, inner)},
        **{"up_proj": (dims.hidden, inner), "down_proj": (inner, dims.hidden)},
    }
    modules = {
        (layer, site): LoraModule(
            a=torch.randn(rank, widths[name][0], generator=random) / widths[name][0] ** 0.5,
            b=torch.randn(widths[name][1], rank, generator=random) / rank**0.5,
            scale=0.7,
        )
        for layer in range(dims.layers)
        for site, name in enumerate(SITES)
    }
    return AdapterRevision(
        digest=f"{number:064x}", source="random", modules=modules, expected=len(modules)
    )


@contextmanager
def serving(
    model: Path,
    device: str,
    pages: int | None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    *,
    eager: bool = False,
) -> Iterator[tuple[LLM, int]]:
    """An engine with all adapters registered, and the pages of the largest one."""
    llm = LLM(
        str(model),
        device=device,
        dtype=dtype,
        max_model_len=128,
        max_num_seqs=BATCH,
        num_pages=pages or 4096,
        enable_prefix_caching=False,
        enforce_eager=eager,
    )
    assert llm.engine is not None
    rank, largest = llm.rank, 0
    for number in range(ADAPTERS):
        adapter = revision(rank.dims, number)
        kind = getattr(torch, dtype)
        images = pack_adapter(adapter, rank.cuts, rank.dims, kind, rank.layout.page_bytes)
        largest = max(largest, int(images[0].pages.shape[0]))
        llm.engine.roster.register(f"adapter-{number}", adapter, images)
    yield llm, largest
    llm.close()


def request(number: int, logprobs: int | None) -> tuple[Submit, str]:
    """Every fifth request is for the base, the others for the adapters in turn."""
    length = (3 + number % 11) * (5 if number % 6 == 1 else 1)
    prompt = [(number * 131 + i * 17) % 990 + 5 for i in range(length)]
    params = SamplingParams(
        temperature=0.0, max_tokens=4 + number % 7, ignore_eos=True, logprobs=logprobs
    )
    digest = "" if number % 5 == 0 else f"{number % ADAPTERS:064x}"
    return Submit(request_id=str(number), model="", prompt=prompt, params=params), digest


def answers(llm: LLM, *, together: bool, logprobs: int | None = 2) -> dict[str, OpenPrompt]:
    """All requests, one after the other or a few joining at every other step."""
    engine = llm.engine
    assert engine is not None
    opened: dict[str, OpenPrompt] = {}
    waiting = [request(number, logprobs) for number in range(REQUESTS)]
    steps = 0
    while waiting or engine.requests:
        for _ in range(steps % 2 * 3 if together else not engine.requests):
            if waiting:
                message, digest = waiting.pop(0)
                opened[message.request_id] = OpenPrompt(message, None)
                engine.submit(message, digest)
        for output in engine.step():
            assert not isinstance(output, Failed), output
            opened[output.request_id].take(output)
        steps += 1
        assert steps < 5000
    return opened


def assert_same_up_to_near_ties(
    got: dict[str, OpenPrompt], truth: dict[str, OpenPrompt], near: float = NEAR_TIE
) -> None:
    ties = 0
    for number, solo in truth.items():
        expected, answer = solo.completion(), got[number].completion()
        assert len(answer.tokens) == len(expected.tokens)
        assert expected.logprobs is not None
        for mine, other, report in zip(
            answer.tokens, expected.tokens, expected.logprobs, strict=True
        ):
            if mine != other:
                best, second = report.top_logprobs
                assert best - second < near, (number, mine, other)
                ties += 1
                break
    assert ties <= REQUESTS * (1 if near == NEAR_TIE else 4) // 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("rotation") / "model")


@pytest.fixture(scope="module")
def alone(model: Path) -> tuple[dict[str, OpenPrompt], int]:
    """The tokens of each request by itself, on the CPU; the pages of the largest adapter."""
    with serving(model, "cpu", None) as (llm, largest):
        return answers(llm, together=False), largest


def captured_prompts(llm: LLM) -> set[bool]:
    """Whether steps without prompts and steps with some were captured."""
    graphs = llm.rank.worker.runner._graphs
    return set() if graphs is None else {key.shape.prompts > 0 for key in graphs._captured}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "head_dim", "near"), [("float32", 32, 0.02), BFLOAT16])
def test_captured_steps_give_the_tokens_of_launched_ones(
    tmp_path: Path, dtype: Literal["float32", "bfloat16"], head_dim: int, near: float
) -> None:
    """The same requests join at the same steps, with prompts beside decode rows."""
    model, found = write_model(tmp_path / "model", head_dim), []
    for eager in (True, False):
        with serving(model, "cuda", None, dtype, eager=eager) as (llm, _):
            found.append(answers(llm, together=True, logprobs=2 if eager else None))
            assert captured_prompts(llm) == (set() if eager else {False, True})
    assert_same_up_to_near_ties(found[1], found[0], near)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])], ids=str)
def test_rotating_adapters_give_the_tokens_of_solo_runs(
    model: Path,
    alone: tuple[dict[str, OpenPrompt], int],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    truth, largest = alone
    published: list[int] = []
    begin = Copies.begin

    def counting(self: Copies, handle: int, descriptor: int, pages: list[int]) -> None:
        published.append(handle)
        begin(self, handle, descriptor, pages)

    monkeypatch.setattr(Copies, "begin", counting)
    with serving(model, device, RESIDENT * largest + 2 * BATCH) as (llm, _):
        got = answers(llm, together=True, logprobs=None)
        assert captured_prompts(llm) == ({False, True} if device == "cuda" else set())
    assert len(set(published)) == ADAPTERS and len(published) > 2 * ADAPTERS
    assert len({tuple(item.completion().tokens) for item in truth.values()}) > REQUESTS // 2
    assert_same_up_to_near_ties(got, truth)
