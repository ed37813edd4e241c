"""Adapter faults that users of other engines met, each as it was met.

`WHERE` says which test shows that a kind of fault cannot happen here; the tests in this file are
those that belong nowhere else. Sources are public issues and pull requests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.distributed.agreement import compare
from tests.helpers.tiny_models import make_checkpoint, make_peft_adapter, oracle_logits
from tp_engine import LLM, SamplingParams
from tp_engine.messages import Output, Submit

ROOT = Path(__file__).parents[2]
CONFIG = "adapters/test_config.py"
FILES = "adapters/test_files.py"
HTTP = "e2e/test_adapters.py"
ISOLATION = "distributed/test_isolation.py"
GREEDY = "distributed/test_greedy.py"
NAMES = "adapters/test_names.py"
PEFT = "adapters/test_peft_oracle.py"
READER = "adapters/test_reader.py"
REGISTRY = "adapters/test_registry.py"
HERE = "engine/test_reported_faults.py"
ENGINE = "engine/test_engine.py"

WHERE = {
    # wrong without a word
    "rsLoRA ignored (sglang#40835, TensorRT-LLM#1668)": (
        f"{PEFT}::test_scales_named_by_the_issue_reports"
    ),
    "one scale for all modules (axolotl PR#3673)": (
        f"{PEFT}::test_scales_named_by_the_issue_reports"
    ),
    "DoRA ignored (vllm#10849)": f"{PEFT}::test_magnitudes_and_biases_equal_pefts",
    "raw alpha as scale (mlx-vlm#845)": f"{PEFT}::test_scales_named_by_the_issue_reports",
    "key prefix matches nothing, base is served (vllm#34186, #48019)": (
        f"{READER}::test_a_key_prefix_that_matches_nothing_is_refused"
    ),
    "PiSSA, LoftQ, OLoRA on an unmodified base (peft#1929)": (
        f"{CONFIG}::test_unsupported_fields_are_refused_by_name"
    ),
    "expert LoRA dropped (vllm PR#41384)": f"{CONFIG}::test_unsupported_fields_are_refused_by_name",
    "fp32 adapter served as base (tensorrtllm_backend#791)": (
        f"{HERE}::test_an_fp32_adapter_is_cast_not_served_as_base"
    ),
    "unknown adapter answered by base (TGI#2505)": (
        "e2e/test_http.py::test_an_unknown_model_is_not_found"
    ),
    "QLoRA adapter on another base (peft#2105)": (
        "engine/test_loader.py::test_a_revision_of_another_base_earns_a_warning_with_both_digests"
    ),
    # another tenant's output
    "a load re-routes a running request (vllm#47724)": (
        f"{HERE}::test_a_load_does_not_re_route_running_requests"
    ),
    "an evicted place keeps old weights (sglang#7426)": (
        f"{ISOLATION}::test_adapters_that_share_too_little_room_stay_themselves"
    ),
    "base rows get an adapter (vllm#42008)": (
        f"{GREEDY}::test_a_mixed_batch_equals_transformers_and_peft"
    ),
    "in-place reload hits old KV (vllm#42125)": f"{HTTP}::test_an_in_place_reload_hits_no_old_kv",
    "prompt cache across adapters (llama.cpp#26207)": (
        f"{ISOLATION}::test_one_prompt_has_three_answers_cached_or_not"
    ),
    "NaN in one adapter (sglang PR#4799)": f"{READER}::test_one_nan_or_infinity_is_refused",
    "NaN in an old place (sglang PR#4799)": f"{HERE}::test_nan_in_old_places_reaches_nobody",
    "names that collapse (kserve PR#6085)": (
        f"{HTTP}::test_names_that_look_alike_stay_two_adapters"
    ),
    "adapter named like the base (surogate#145)": f"{REGISTRY}::test_the_bases_name_is_refused",
    # the engine falls
    "lm_head of another vocabulary (vllm#11702)": "adapters/test_ends.py::test_refused_by_name",
    "rank found wrong at step time (vllm#11702)": (
        f"{READER}::test_rank_64_in_config_and_8_in_tensors_is_refused_with_both_numbers"
    ),
    "wrong base (sglang#3713)": f"{READER}::test_wrong_base_is_refused_with_both_numbers",
    "more adapters than places (sglang#23141, vllm#11077)": (
        f"{ENGINE}::test_adapters_rotate_through_room_for_two"
    ),
    "unload while running (sglang#36894, vllm#13698)": (
        f"{HTTP}::test_an_unload_while_sixteen_outputs_run_drains"
    ),
    "concurrent loads (vllm PR#20636)": f"{HTTP}::test_of_many_loads_of_one_name_one_succeeds",
    "one bad adapter blocks the good (gateway-api-inference-extension#584)": (
        "adapters/test_loading.py::test_a_bad_adapter_does_not_block_a_good_one"
    ),
    "base name looked up on a hub (lorax#311)": (
        f"{READER}::test_another_base_name_earns_a_warning_and_is_never_looked_up"
    ),
    # files
    "unknown config keys, null or not": f"{CONFIG}::test_unknown_fields_that_are_off_are_ignored",
    "missing peft_type or base_model_name_or_path": (
        f"{CONFIG}::test_missing_type_or_base_name_is_accepted"
    ),
    "keys of other trainers": f"{READER}::test_names_of_other_writers_mean_the_same_revision",
    "DeepSpeed ZeRO-3 shape [0]": f"{READER}::test_odd_shapes_are_refused",
    "only adapter_model.bin": f"{FILES}::test_pickled_weights_are_refused_and_never_run",
    "corrupt safetensors": f"{FILES}::test_corrupt_safetensors_are_refused",
    "paths": f"{FILES}::test_nothing_leads_out_of_a_root",
    "names": f"{NAMES}::test_bad_names_are_refused",
    # tensor parallel
    "more ranks than KV heads (sglang PR#24420)": (
        f"{GREEDY}::test_a_mixed_batch_equals_transformers_and_peft"
    ),
    "rank not divisible by the ranks (vllm#10342)": (
        f"{ISOLATION}::test_a_request_alone_and_in_a_batch_are_equal_bit_for_bit"
    ),
    "packed NF4 shape taken for dimensions (sglang PR#31066)": (
        "distributed/test_quantised.py::test_dequantised_weights_are_those_of_bitsandbytes"
    ),
    "adapters rotate under tensor parallelism (vllm#20873)": (
        f"{ISOLATION}::test_adapters_that_share_too_little_room_stay_themselves"
    ),
    "wrong at rank 32 in a mixed batch (lorax#70)": (
        f"{HERE}::test_every_rank_in_a_mixed_batch_is_as_alone"
    ),
}


@pytest.mark.parametrize("kind", WHERE)
def test_each_kind_of_fault_has_its_test(kind: str) -> None:
    file, _, test = WHERE[kind].partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text("utf-8"))
    assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


# -------------------------------------------------------------------------------------------------

GREEDILY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
MIXED = (8, 16, 32, 64)
"""LoRA ranks of the report on rank 32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "llama")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name, which is the LoRA rank."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        str(r): make_peft_adapter(root / str(r), model, r=r, alpha=r / 2, seed=r) for r in MIXED
    }


def serve(model: Path, adapters: dict[str, Path], **options: object) -> LLM:
    lora = {name: str(path) for name, path in adapters.items()}
    return LLM(str(model), lora=lora, **{"dtype": "float32", "max_model_len": 128, **options})


def prompt(seed: int, length: int = 9) -> list[int]:
    return [(seed * 37 + i * 11) % 120 + 4 for i in range(length)]


def assert_right(
    model: Path, adapter: Path | None, asked: Sequence[int], tokens: Sequence[int]
) -> None:
    logits = oracle_logits(model, [*asked, *tokens[:-1]], adapter, torch.float64)
    assert compare(list(tokens), logits[len(asked) - 1 :]).wrong == []


class Ongoing:
    """Requests of an engine that others join."""

    def __init__(self, llm: LLM) -> None:
        assert llm.engine is not None
        self._llm, self.engine = llm, llm.engine
        self.tokens: dict[str, list[int]] = {}

    def ask(self, name: str) -> None:
        digest = self._llm.registry.resolve(name).digest
        message = Submit(request_id=name, model=name, prompt=prompt(int(name)), params=GREEDILY)
        self.engine.submit(message, digest)

    def step(self, count: int) -> None:
        for _ in range(count):
            for output in self.engine.step():
                assert isinstance(output, Output), output
                self.tokens.setdefault(output.request_id, []).extend(output.tokens)


def test_a_load_does_not_re_route_running_requests(model: Path, adapters: dict[str, Path]) -> None:
    """Room for two adapters: two decode while two others are waited for, loaded and run."""
    with serve(model, adapters, num_pages=4096) as llm:
        assert llm.engine is not None
        pages = sorted(each.pages for each in llm.engine.adapters.values())
    room = pages[-1] + pages[-2] + 4 * 4
    with serve(model, adapters, num_pages=room) as llm:
        ongoing = Ongoing(llm)
        for name in ("8", "64"):
            ongoing.ask(name)
        ongoing.step(5)
        for name in ("16", "32"):
            ongoing.ask(name)
        ongoing.step(200)
        assert not ongoing.engine.requests
        assert ongoing.engine.residency.evictions > 0
    for name, path in adapters.items():
        assert_right(model, path, prompt(int(name)), ongoing.tokens[name])


def test_nan_in_old_places_reaches_nobody(model: Path, adapters: dict[str, Path]) -> None:
    """Whatever a page held before, keys, values and adapters are written before they are read."""
    with serve(model, adapters, num_pages=200, enable_prefix_caching=False) as llm:
        arena = llm.rank.worker.runner.arena
        arena.memory.fill_(0xFF)
        assert arena.memory[:4].view(torch.float32).isnan().all()
        names = ["8", None, "32", "16"]
        for seeds in (range(4), range(4, 8)):
            asked = [prompt(seed, 3 + seed) for seed in seeds]
            answers = llm.generate(asked, GREEDILY, model=names)
            assert answers is not None
            for name, tokens, answer in zip(names, asked, answers, strict=True):
                assert_right(model, adapters[name] if name else None, tokens, answer.tokens)


def test_an_fp32_adapter_is_cast_not_served_as_base(
    model: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """On a 16-bit base, an adapter of float32 tensors is the adapter of the same 16-bit ones."""
    half = make_peft_adapter(tmp_path / "half", model, r=16, alpha=8, seed=16, dtype=torch.bfloat16)
    served = {"single": adapters["16"], "half": half}
    with serve(model, served, dtype="bfloat16", num_pages=400) as llm:
        names = ["single", "half", None]
        answers = llm.generate([prompt(1)] * 3, GREEDILY, model=names)
    assert answers is not None
    single, as_half, base = (answer.tokens for answer in answers)
    assert single == as_half != base


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu])])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    yield request.param


def test_every_rank_in_a_mixed_batch_is_as_alone(
    model: Path, adapters: dict[str, Path], device: str
) -> None:
    """The oracle knows each adapter alone."""
    asked = [prompt(seed, 5 + seed) for seed in range(2 * len(MIXED))]
    names = [str(MIXED[seed % len(MIXED)]) for seed in range(len(asked))]
    with serve(model, adapters, device=device, num_pages=800) as llm:
        answers = llm.generate(asked, GREEDILY, model=names)
        assert answers is not None
        for name, tokens, answer in zip(names, asked, answers, strict=True):
            assert_right(model, adapters[name], tokens, answer.tokens)
