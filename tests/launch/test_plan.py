"""The capacity planner: its numbers are those of the engine."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launch import plan
from launch.adapter_kinds import AdapterKind, read_profile
from launch.planning import most_drawn, plan_capacity
from sharding import cut_model
from tests.helpers.tiny_models import make_checkpoint, make_peft_adapter
from tp_engine import LLM
from tp_engine.adapters import pack_adapter, read_adapter
from tp_engine.config import EngineConfig
from tp_engine.models import ModelSpec
from tp_engine.tiers.room import words_a_page


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "llama", tokenizer=True)


def capacity_of(model: Path, world: int, kinds: list[AdapterKind], **options: Any) -> Any:
    spec = ModelSpec.from_directory(model)
    config = EngineConfig(model=str(model), dtype="float32", **options)
    resolved = config.resolve(cuda=False, model_positions=spec.max_position_embeddings)
    return plan_capacity(spec, resolved, world, memory=1 << 30, kinds=kinds, kv_tokens=0)


def test_the_plan_is_what_the_engine_reports(model: Path, tmp_path: Path) -> None:
    targets = ("q_proj", "v_proj", "down_proj")
    adapter = make_peft_adapter(tmp_path / "a", model, r=5, targets=list(targets))
    size = 3_000_000
    capacity = capacity_of(
        model, 1, [AdapterKind(rank=5, count=1, targets=targets)], arena_bytes=size
    )
    llm = LLM(str(model), lora={"a": str(adapter)}, dtype="float32", arena_bytes=size)
    engine = llm.engine
    assert engine is not None
    assert capacity.pages == engine.stats().gauges["pages_total"] == engine.limits.num_pages
    assert capacity.layout == engine.layout
    (footprint,) = engine.adapters.values()
    assert capacity.kinds[0].pages == footprint.pages
    assert capacity.kinds[0].row_bytes == footprint.row_bytes
    assert capacity.host_bytes == footprint.pages * engine.layout.page_bytes
    llm.close()


@pytest.mark.parametrize("world", [1, 3])
def test_a_gpu_has_room_for_what_comes_with_the_pages(world: int, model: Path) -> None:
    capacity = capacity_of(model, world, [], gpu_memory_utilization=0.5)
    dims = ModelSpec.from_directory(model).dims()
    page = capacity.layout.page_bytes + 8 * words_a_page(dims, capacity.layout)
    base = capacity.need.weights + capacity.need.scratch
    assert 0 <= (1 << 29) - base - capacity.pages * page < page


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"use_dora": True},
    "bias": {"lora_bias": True},
}


@pytest.mark.parametrize("extra", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_an_adapters_pages_are_those_of_its_images(
    world: int, extra: str, model: Path, tmp_path: Path
) -> None:
    adapter = make_peft_adapter(tmp_path / "a", model, r=7, **KINDS[extra])
    spec = ModelSpec.from_directory(model)
    kind = AdapterKind(rank=7, count=3, dora=extra == "dora", bias=extra == "bias")
    capacity = capacity_of(model, world, [kind], arena_bytes=1 << 22)
    (need,) = capacity.kinds
    images = pack_adapter(
        read_adapter(adapter, spec),
        cut_model(spec.dims(), world),
        spec.dims(),
        torch.float32,
        capacity.layout.page_bytes,
    )
    assert {image.pages.shape[0] for image in images} == {need.pages}
    assert need.allocated == images[0].pages.nbytes >= need.row_bytes
    assert need.row_bytes == max(image.row_bytes for image in images)
    plain = capacity_of(model, world, [AdapterKind(rank=7, count=3)], arena_bytes=1 << 22)
    assert (need.row_bytes > plain.kinds[0].row_bytes) == (extra != "plain")
    assert capacity.host_bytes == 3 * images[0].pages.nbytes
    assert capacity.disk_bytes == 3 * read_adapter(adapter, spec).nbytes


ENDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pairs": (
        {"targets": ["q_proj", "embed_tokens", "lm_head"]},
        {"targets": ("q_proj", "embed_tokens", "lm_head")},
    ),
    "saved": (
        {"targets": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"targets": ("q_proj",), "saved": ("embed_tokens", "lm_head")},
    ),
    "rows": (
        {"targets": ["q_proj"], "trainable_token_indices": [1, 5, 9, 60]},
        {"targets": ("q_proj",), "tokens": 4},
    ),
}


@pytest.mark.parametrize("case", ENDS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_changes_of_the_embedding_and_the_head_are_counted(
    world: int, tied: bool, case: str, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "base", "llama", tie_word_embeddings=tied, vocab_size=400)
    fields, kind = ENDS[case]
    spec = ModelSpec.from_directory(model)
    capacity = capacity_of(model, world, [AdapterKind(rank=6, count=1, **kind)], num_pages=99)
    revision = read_adapter(make_peft_adapter(tmp_path / "a", model, r=6, **fields), spec)
    page_bytes = capacity.layout.page_bytes
    cuts = cut_model(spec.dims(), world)
    images = pack_adapter(revision, cuts, spec.dims(), torch.float32, page_bytes)
    assert images[0].pages.shape[0] == capacity.kinds[0].pages
    filled = max(int(image.pages.any(dim=1).sum()) for image in images)
    assert filled == capacity.kinds[0].pages
    plain = capacity_of(
        model, world, [AdapterKind(rank=6, count=1, targets=("q_proj",))], num_pages=99
    )
    assert capacity.kinds[0].row_bytes > plain.kinds[0].row_bytes


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(0, 12),
)
def test_most_drawn_is_what_counting_all_draws_gives(
    kinds: list[tuple[int, int]], room: int
) -> None:
    pages, counts = [k[0] for k in kinds], [k[1] for k in kinds]
    pool = [size for size, count in kinds for _ in range(count)]
    right = (0, 0)
    for drawn in range(1, min(len(pool), 5) + 1):
        sums = sorted(sum(draw) for draw in itertools.product(pool, repeat=drawn))
        if sum(each <= room for each in sums) / len(sums) < 0.99:
            break
        fits = [n for n in range(room + 1) if sum(s <= n for s in sums) / len(sums) >= 0.99]
        right = (drawn, fits[0])
    else:
        if len(pool) > 5:
            return  # too many draws to count
    assert most_drawn(pages, counts, room) == right


def test_the_command_prints_the_plan(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text('[{"rank": 4, "count": 9}, {"rank": 8, "count": 2, "targets": ["o_proj"]}]')
    options = [f"--model={model}", "--gpus=2", "--memory=1GiB", f"--adapters={profile}"]
    assert plan.main([*options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_tokens"] == found["pages"] * found["tokens_per_page"]
    assert [each["rank"] for each in found["adapters"]] == [4, 8]
    assert found["adapters_at_once"] == 11
    assert plan.main(options) == 0
    assert f"{found['pages']} pages of {found['page_bytes']} bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting"),
        ("{}", "must be a list"),
        ('[{"rank": 4}]', "must have rank and count"),
        ('[{"rank": 0, "count": 1}]', "rank=0 must be a whole number from 1 on"),
        ('[{"rank": 4, "count": "x"}]', "count='x' must be"),
        ('[{"rank": 4, "count": 1, "dora": 1}]', "dora=1 must be true or false"),
        ("[5]", "entry 1: 5 must be an object"),
        ('[{"rank": 4, "count": 1}, {"rank": true, "count": 1}]', "entry 2: rank=True must be"),
        (
            '[{"rank": 4, "count": 1, "size": 1}]',
            "no kind has size: .* may have bias, dora, saved, targets, tokens",
        ),
        ('[{"rank": 4, "count": 1, "saved": ["q_proj"]}]', "saved=.'q_proj'. must be some of"),
        ('[{"rank": 4, "count": 1, "tokens": -1}]', "tokens=-1 must be a whole number"),
        (
            '[{"rank": 4, "count": 1, "targets": ["lm_head"], "saved": ["lm_head"]}]',
            "none of saved=.'lm_head'.",
        ),
        ('[{"rank": 4, "count": 1, "targets": ["nope"]}]', "targets=.'nope'. must be some of"),
        ('[{"rank": 4, "count": 1, "targets": "q_proj"}]', "targets='q_proj' must be a list of"),
        ('[{"rank": 4, "count": 1, "saved": [["x"]]}]', "must be a list of names"),
    ],
)
def test_a_wrong_profile_says_what_is_wrong(text: str, reason: str, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_profile(profile)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--gpus=0", "--gpus: 0 must be at least 1"),
        ("--kv-tokens=-1", "--kv-tokens: -1 must be at least 0"),
        ("--memory=80 GBs", "'80 GBs' is not a size: write bytes or a unit"),
        ("--max-num-seqs=x", "--max-num-seqs: 'x' is not a whole number"),
        ("--gpu-memory-utilization=half", "'half' is not a number"),
    ],
)
def test_a_wrong_option_is_named(
    option: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan.main(["--model=m", "--gpus=2", "--memory=1GiB", option])
    assert ended.value.code == 2 and reason in capsys.readouterr().err


def test_too_little_memory_says_what_to_change(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan.main([f"--model={model}", "--gpus=1", "--memory=1MiB"]) == 2
    assert "more memory, more ranks or --quantize nf4" in capsys.readouterr().err
