"""The checkpoints, the adapters and the cases."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from launch.demo.model import CHECKOUT, ensure_nf4_model
from sharding import SITES
from tests.distributed.adapter_files import write_adapter
from tests.distributed.workload import Ask, Case, Room
from tests.helpers.tiny_models import KINDS, Kind, make_checkpoint, make_peft_adapter
from tp_engine.models import ModelSpec
from tp_engine.params import SamplingParams
from tp_engine.text import Tokenizer

WORLDS = (1, 2, 3, 4)
GREEDY_TOKENS = 64
LOAD_REQUESTS = 64
LOAD_TOKENS = 24
SMALL = {"max_num_seqs": 16, "num_pages": 400}
"""Enough for everything at once."""
LOAD = {"max_num_seqs": 32, "max_num_batched_tokens": 64}
"""With half of the sequences decoding, prompts get 32 rows of a step."""

ADAPTER_KINDS: dict[str, dict[str, Any]] = {
    "r1": {"r": 1, "alpha": 2.0},
    "r5": {"r": 5, "alpha": 5.0, "targets": ("q_proj", "v_proj")},
    "r8_rslora": {"r": 8, "alpha": 4.0, "rslora": True},
    "r33": {"r": 33, "alpha": 16.0},
    "patterns": {
        "r": 4,
        "alpha": 4.0,
        "rank_pattern": {"layers.1.self_attn.q_proj": 9, "down_proj": 2},
        "alpha_pattern": {"layers.0.mlp.up_proj": 16.0, "k_proj": 1.0},
    },
    "last_layer": {"r": 6, "alpha": 12.0, "layers": (1,)},
    "keys_values": {"r": 7, "alpha": 14.0, "targets": ("k_proj", "v_proj")},
    "dora": {"r": 5, "alpha": 10.0, "use_dora": True},
    "dora_rslora": {
        "r": 6,
        "alpha": 3.0,
        "rslora": True,
        "use_dora": True,
        "targets": ("q_proj", "o_proj", "down_proj"),
        "rank_pattern": {"layers.0.self_attn.o_proj": 3},
    },
    "lora_bias": {"r": 4, "alpha": 8.0, "lora_bias": True},
    "mlp": {"r": 3, "alpha": 6.0, "targets": ("gate_proj", "up_proj", "down_proj")},
}
"""LoRA ranks that no world size divides, some targets only, scales by every rule, DoRA, biases."""

TOKENS = [9, 100, 17, 64, 63, 127, 5]
Q = ("q_proj",)
END_KINDS: dict[str, dict[str, Any]] = {
    "head": {"r": 3, "targets": (*Q, "lm_head")},
    "embedding": {"r": 7, "targets": (*Q, "embed_tokens")},
    "tie": {"r": 5, "targets": (*Q, "embed_tokens"), "ensure_weight_tying": True},
    "saved": {"targets": Q, "modules_to_save": ["embed_tokens", "lm_head"]},
    "saved_head": {"targets": Q, "modules_to_save": ["lm_head"]},
    "rows": {"targets": Q, "trainable_token_indices": TOKENS},
    "rows_of_head": {"targets": Q, "trainable_token_indices": {"lm_head": TOKENS}},
    "rows_under_head": {"targets": (*Q, "lm_head"), "trainable_token_indices": TOKENS},
    "plain": {"r": 6, "alpha": 12.0},
}
"""Every way of changing the embedding and the LM head, and one that leaves them alone."""
ENDS = [f"ends-{tied}-{weights}" for tied in ("apart", "tied") for weights in ("plain", "nf4")]

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 32, "rope_theta": 100.0}
LONG: dict[str, tuple[Kind, dict[str, Any], int]] = {
    "window-mistral": ("mistral", {"sliding_window": 24}, 90),
    "window-qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
        90,
    ),
    "window-qwen3": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        90,
    ),
    "rope-default": ("llama", {}, 256 - GREEDY_TOKENS),
    "rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 150),
    "rope-llama3": ("llama", {"rope_parameters": {**LLAMA3, **ORIGINAL}}, 150),
    "rope-yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}},
        150,
    ),
}
"""By case: kind, config and prompt length. Prompts beyond a sliding window or the original
context; the default rope goes up to the last position of the model."""

COLD_HOST = 120 * 2**10
"""Bytes of host memory a rank: too little for eight adapters at once."""
NO_UNITS = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""With an MLP and a vocabulary of two units each, some of four ranks hold no unit of a module."""


def greedy(tokens: int = GREEDY_TOKENS, **fields: Any) -> SamplingParams:
    """Greedy, past any end-of-sequence token."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, **fields)


def prompt(length: int, seed: int, vocabulary: int = 128) -> list[int]:
    """Random tokens."""
    return random.Random(seed).choices(range(3, vocabulary), k=length)


class Material:
    """Makes every file once and lists the cases."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._made: dict[str, str] = {}
        self.smol = str(ensure_nf4_model())
        self.cases = {case.name: case for case in self._cases()}

    def checkpoint(self, name: str, kind: Kind, **options: Any) -> str:
        """A tiny model by name."""
        if name not in self._made:
            self._made[name] = str(make_checkpoint(self._scratch / name, kind, **options))
        return self._made[name]

    def adapter(self, name: str, model: str, **options: Any) -> str:
        """A random adapter of a model."""
        key = f"{Path(model).name}-{name}"
        if key not in self._made:
            path = self._scratch / key
            self._made[key] = str(make_peft_adapter(path, Path(model), **options))
        return self._made[key]

    def smol_adapter(self, r: int, sites: Sequence[str]) -> str:
        """A random adapter of SmolLM2, written without building the model."""
        path = self._scratch / f"smol-r{r}"
        if not path.exists():
            write_adapter(path, ModelSpec.from_directory(Path(self.smol)), r, sites)
        return str(path)

    def adapters(self, model: str, kinds: Sequence[str] = tuple(ADAPTER_KINDS)) -> dict[str, str]:
        """Adapters of some kinds, each with other numbers."""
        seeds = {kind: seed for seed, kind in enumerate(ADAPTER_KINDS)}
        return {
            kind: self.adapter(kind, model, seed=seeds[kind], **ADAPTER_KINDS[kind])
            for kind in kinds
        }

    def _cases(self) -> list[Case]:
        return [
            *self._greedy_kinds(),
            *self._long_prompts(),
            self._no_units(),
            *self._quantising(),
            *self._alone_and_together(),
            *self._small_rooms(),
            *self._ends(),
            *overlapping(self._aborts()),
            *overlapping(self._sampling()),
            *self._load_tiny(),
            self._smol_weights(),
            self._smol_greedy(),
            self._smol_load(),
        ]

    def _greedy_kinds(self) -> list[Case]:
        cases = []
        for kind in KINDS:
            for weights in ("plain", "nf4"):
                model = self.checkpoint(f"{kind}-{weights}", kind, nf4=weights == "nf4")
                adapters = self.adapters(self.checkpoint(f"{kind}-plain", kind))
                cases.append(
                    Case(
                        name=f"greedy-{kind}-{weights}",
                        model=model,
                        worlds=WORLDS,
                        adapters=adapters,
                        options=SMALL,
                        rounds=[mixed_batch(adapters)],
                    )
                )
        return cases

    def _long_prompts(self) -> list[Case]:
        cases = []
        for name, (kind, options, length) in LONG.items():
            model = self.checkpoint(name, kind, seed=3, **options)
            adapters = self.adapters(model, ["r5"])
            asks = [
                Ask(prompt=prompt(length, seed), params=greedy(), model=adapter)
                for seed, adapter in enumerate((None, "r5"))
            ]
            cases.append(
                Case(
                    name=name,
                    model=model,
                    worlds=(2, 3),
                    adapters=adapters,
                    options=SMALL,
                    rounds=[asks],
                )
            )
        return cases

    def _no_units(self) -> Case:
        model = self.checkpoint("no-units", "llama", nf4=True, seed=5, **NO_UNITS)
        adapters = self.adapters(model)
        return Case(
            name="no-units",
            model=model,
            worlds=(4,),
            adapters=adapters,
            options=SMALL,
            rounds=[mixed_batch(adapters)],
        )

    def _quantising(self) -> list[Case]:
        plain = self.checkpoint("llama-plain", "llama")
        stored = self.checkpoint("llama-single-nf4", "llama", nf4=True, double_quant=False)
        adapters = self.adapters(plain, ["r1", "keys_values"])
        asks = mixed_batch(adapters, logprobs=2)
        return [
            Case(
                name=name,
                model=model,
                worlds=(2, 3),
                adapters=adapters,
                options=SMALL | options,
                rounds=[asks],
                checksums=True,
            )
            for name, model, options in (
                ("quantised-stored", stored, {}),
                ("quantised-at-load", plain, {"quantize": "nf4"}),
            )
        ]

    def _alone_and_together(self) -> list[Case]:
        """Deterministic: a batch, then each of its requests alone."""
        model = self.checkpoint("llama-nf4", "llama", nf4=True)
        plain = self.checkpoint("llama-plain", "llama")
        adapters = {
            f"r{r}": self.adapter(f"alone-r{r}", plain, r=r, seed=r) for r in (1, 8, 16, 33, 64)
        }
        asks = mixed_batch(adapters, tokens=12, logprobs=3)
        base = [ask for ask in asks if ask.model is None]
        return [
            Case(
                name=name,
                model=model,
                worlds=(1, 2, 3),
                adapters=adapters,
                options={**SMALL, "deterministic": True, **options},
                rounds=[asks, *([ask] for ask in (*base, *asks))],
            )
            for name, options in (
                ("alone", {"enable_prefix_caching": False, "max_num_batched_tokens": 16}),
                ("alone-cached", {}),
            )
        ]

    def _small_rooms(self) -> list[Case]:
        model = self.checkpoint("qwen3-nf4", "qwen3", nf4=True)
        plain = self.checkpoint("qwen3-plain", "qwen3")
        two = {
            "qv": self.adapter("room-qv", plain, r=8, targets=("q_proj", "v_proj"), seed=1),
            "q": self.adapter("room-q", plain, r=8, targets=("q_proj",), seed=2),
        }
        five = {f"a{i}": self.adapter(f"room-{i}", plain, r=4 + i, seed=i) for i in range(5)}
        same = prompt(40, 11)
        many = [
            Ask(prompt=prompt(10 + i, i), params=greedy(24), model=name)
            for i, name in enumerate((*five, None) * 2)
        ]
        shared = {"model": model, "worlds": (1, 2, 3)}
        return [
            Case(
                name="place-taken-over",
                adapters=two,
                room=Room(adapters=1, sequences=1),
                options={"max_num_seqs": 4},
                rounds=[
                    [Ask(prompt=same, params=greedy(24), model=name)]
                    for name in ("qv", "q", "qv", "q")
                ],
                **shared,
            ),
            Case(
                name="prompt-of-three",
                adapters=two,
                options=SMALL,
                rounds=[
                    [Ask(prompt=same, params=greedy(24), model=name) for name in ("qv", "q", None)]
                ]
                * 2,
                **shared,
            ),
            Case(
                name="rotation",
                adapters=five,
                room=Room(adapters=2, sequences=2),
                options={"max_num_seqs": 8},
                rounds=[many, many],
                **shared,
            ),
        ]

    def _ends(self) -> list[Case]:
        """All at once; then one after the other where only few fit."""
        cases = []
        for name in ENDS:
            _, tied, weights = name.split("-")
            options: dict[str, Any] = {"tie_word_embeddings": tied == "tied"}
            plain = self.checkpoint(f"ends-{tied}", "llama", seed=9, **options)
            model = plain
            if weights == "nf4":
                model = self.checkpoint(name, "llama", seed=9, nf4=True, **options)
            adapters = {
                kind: self.adapter(f"end-{kind}", plain, seed=seed, **fields)
                for seed, (kind, fields) in enumerate(END_KINDS.items())
            }
            asks = mixed_batch(adapters, tokens=20, logprobs=2)
            shared = {"model": model, "worlds": (1, 2, 3), "adapters": adapters}
            cases.append(Case(name=name, options=SMALL, rounds=[asks], **shared))
            if weights == "plain":
                cases.append(
                    Case(
                        name=f"{name}-rotation",
                        room=Room(adapters=2, sequences=2),
                        options={"max_num_seqs": 4},
                        rounds=[asks, asks[::-1]],
                        **shared,
                    )
                )
        return cases

    def _aborts(self) -> Case:
        model = self.checkpoint("qwen2-plain", "qwen2")
        adapters = self.adapters(model, ["r5", "mlp"])
        asks = [
            Ask(prompt=prompt(20, i), params=greedy(), model=(None, *adapters)[i % 3])
            for i in range(16)
        ]
        return Case(
            name="aborted",
            model=model,
            worlds=(2, 3),
            adapters=adapters,
            options={"max_num_seqs": 8, "max_num_batched_tokens": 24, "num_pages": 60},
            aborted=asks,
            abort_after=8,
            rounds=[asks[:3]],
        )

    def _sampling(self) -> Case:
        model = self.checkpoint("mistral-plain", "mistral")
        adapters = self.adapters(model, ["r5"])
        asks = [
            Ask(
                prompt=prompt(10, i),
                params=SamplingParams(max_tokens=20, seed=100 + i, logprobs=4, **fields),
                model="r5" if i % 2 else None,
            )
            for i, fields in enumerate(SAMPLING.values())
        ]
        return Case(
            name="sampling",
            model=model,
            worlds=WORLDS,
            adapters=adapters,
            options={"max_num_seqs": 32, "num_pages": 200},
            rounds=[asks],
        )

    def _load_tiny(self) -> list[Case]:
        model = self.checkpoint("llama-nf4", "llama", nf4=True)
        plain = self.checkpoint("llama-plain", "llama")
        adapters = {f"r{r}": self.adapter(f"load-r{r}", plain, r=r, seed=r) for r in range(1, 9)}
        asks = load(adapters)
        shared = {
            "model": model,
            "worlds": (2,),
            "adapters": adapters,
            "room": Room(share=0.25),
        }
        return [
            Case(
                name="load-tiny-deterministic",
                options={**LOAD, "deterministic": True},
                rounds=[asks, *([ask] for ask in asks)],
                **shared,
            ),
            *overlapping(Case(name="load-tiny", options=LOAD, rounds=[asks], **shared)),
            Case(
                name="load-tiny-cold",
                options={**LOAD, "adapter_host_memory": COLD_HOST},
                rounds=[asks],
                **shared,
            ),
        ]

    def _smol_weights(self) -> Case:
        return Case(
            name="smol-weights",
            model=self.smol,
            worlds=(1, 2, 3),
            options={"keep_dense": False, "num_pages": 4, "max_model_len": 32, "max_num_seqs": 1},
            rounds=[[Ask(prompt=[1, 2, 3], params=greedy(1))]],
            checksums=True,
        )

    def _smol_adapters(self) -> dict[str, str]:
        demo = sorted((CHECKOUT / "launch/demo/adapters").glob("*/adapter_config.json"))
        return {path.parent.name: str(path.parent) for path in demo}

    def _smol_greedy(self) -> Case:
        adapters = self._smol_adapters() | {
            "r5": self.smol_adapter(5, SITES),
            "r33": self.smol_adapter(33, SITES[:3]),
        }
        tokenizer = Tokenizer.load(Path(self.smol))
        texts = ("Tell me about the sea.", "What is the capital of France? Answer in one word.")
        asks = [
            Ask(
                prompt=tokenizer.encode_chat([{"role": "user", "content": texts[i % 2]}]),
                params=greedy(),
                model=name,
            )
            for i, name in enumerate((None, *adapters))
        ]
        return Case(
            name="smol-greedy",
            model=self.smol,
            worlds=WORLDS,
            adapters=adapters,
            options={"num_pages": 400, "max_model_len": 256, "max_num_seqs": 8},
            rounds=[asks],
        )

    def _smol_load(self) -> Case:
        demo = self._smol_adapters()
        adapters = demo | {f"random{r}": self.smol_adapter(r, SITES) for r in (2, 3, 4, 5, 6)}
        return Case(
            name="smol-load",
            model=self.smol,
            worlds=(2,),
            adapters=adapters,
            options={**LOAD, "max_model_len": 128},
            room=Room(share=0.25),
            rounds=[load(adapters, vocabulary=40_000)],
        )


def overlapping(case: Case) -> list[Case]:
    """A case, and the same with each plan made while the step before it is under way."""
    return [case, msgspec.structs.replace(case, name=f"{case.name}-overlap", depth=2)]


def mixed_batch(adapters: dict[str, str], tokens: int = GREEDY_TOKENS, **fields: Any) -> list[Ask]:
    """The base and every adapter at once, prompts of different lengths."""
    return [
        Ask(prompt=prompt(3 + 7 * i, i), params=greedy(tokens, **fields), model=name)
        for i, name in enumerate((None, *adapters))
    ]


def load(adapters: dict[str, str], vocabulary: int = 128) -> list[Ask]:
    """Requests over the base and half of the adapters, then the base and the other half, so that
    pages change hands; each half has a prompt beginning of one page in common."""
    names, half = list(adapters), LOAD_REQUESTS // 2
    asks = []
    for i in range(LOAD_REQUESTS):
        turn = (None, *names[:4]) if i < half else (None, *names[4:])
        asks.append(
            Ask(
                # 26 tokens: two more pages are taken while decoding.
                prompt=prompt(16, 1000 + i // half, vocabulary) + prompt(10, i, vocabulary),
                params=greedy(LOAD_TOKENS),
                model=turn[i % len(turn)],
            )
        )
    return asks


END = 2
"""End-of-sequence token of the tiny models."""
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 5},
    "top_k_one": {"top_k": 1},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "all_three": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 2.0, "temperature": 0.0},
    "frequency_penalty": {"frequency_penalty": 1.5, "temperature": 0.0},
    "logit_bias": {"logit_bias": {5: 4.0, 99: 4.0, 127: -100.0}},
    "min_tokens": {"min_tokens": 6, "logit_bias": {END: 100.0}},
    "stop_token_ids": {"stop_token_ids": (77,), "min_tokens": 3, "logit_bias": {77: 100.0}},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {END: 100.0}},
}
"""One request for each field."""
