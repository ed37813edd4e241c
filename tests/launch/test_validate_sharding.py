"""The sharding validator: finds nothing in sound ranks, and names what is wrong in damaged ones."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.nf4 import PackedNF4, gpu
from launch.demo.cache import cache_root
from launch.validation import run
from launch.validation.batch import Batch
from launch.validation.compare import compare, first_gap
from launch.validation.entry import Entry, Kind
from launch.validation.inventory import base_entries
from launch.validation.live import LiveError
from launch.validation.loading import Loaded, load
from launch.validation.options import read_options
from launch.validation.oracle import _values
from launch.validation.self_test import NEVER, run_self_test
from launch.validation.tensors import check_tensors
from launch.validation.tokens import TokenCheck
from launch.validation.tolerance import EXACT, TOLERANCES, row_errors
from launch.validation.whole import WholeSource
from sharding import Checkpoint, Span, WeightSlice, cut_model
from tests.helpers.tiny_models import make_checkpoint, make_peft_adapter
from tp_engine.adapters import AdapterRevision
from tp_engine.models import ModelSpec
from tp_engine.rank import read_adapters
from tp_engine.ranks.comm import Comm
from tp_engine.ranks.join import join
from tp_engine.weights import load_weights

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "launch" / "validate_sharding.py")
SEVERAL = str(ROOT / "tests" / "launch" / "validate_ranks.py")
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    # Three KV groups over two or four ranks, rows that are no multiple of a quantisation block,
    # MLP and vocabulary with a partial last unit.
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 200,
    "head_dim": 16,
}


@dataclasses.dataclass(frozen=True)
class Files:
    """Tiny models and their adapters."""

    plain: Path
    nf4: Path
    adapters: dict[str, Path]
    nf4_adapter: Path

    @property
    def lora(self) -> list[str]:
        """Of the plain model, as options."""
        return ["--lora", *(f"{name}={path}" for name, path in self.adapters.items())]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    root = tmp_path_factory.mktemp("models")
    plain = make_checkpoint(root / "plain", "llama", tie_word_embeddings=False, **SIZES)
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    nf4 = make_checkpoint(root / "nf4", "qwen2", nf4=True, tie_word_embeddings=True, **sizes)
    patterns = {"q_proj": 3, "layers.1.mlp.down_proj": 9}
    mixed = make_peft_adapter(root / "mixed", plain, r=5, rank_pattern=patterns, rslora=True)
    few = make_peft_adapter(root / "few", plain, r=16, targets=["k_proj", "o_proj"], layers=[1])
    biased = make_peft_adapter(root / "biased", plain, r=2, lora_bias=True)
    rows: dict[str, Any] = {"trainable_token_indices": [1, 70, 130, 199]}
    head = make_peft_adapter(root / "head", plain, targets=["q_proj", "lm_head"], **rows)
    embed: dict[str, Any] = {"modules_to_save": ["lm_head"], "targets": ["v_proj", "embed_tokens"]}
    saved = make_peft_adapter(root / "saved", plain, r=3, seed=1, **embed)
    pattern = {"v_proj": 7}
    other = make_peft_adapter(root / "other", nf4, r=4, rank_pattern=pattern, use_dora=True, **rows)
    adapters = {"mixed": mixed, "few": few, "biased": biased, "head": head, "saved": saved}
    return Files(plain, nf4, adapters, other)


def start(world: int, *arguments: str, timeout: float = 280.0) -> subprocess.CompletedProcess[str]:
    """Run a script and its options under torchrun, or alone at world size 1."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command = [sys.executable, *(launcher if world > 1 else []), *arguments]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "0"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=timeout
    )


def reports(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The machines' reports that were printed."""
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


# --- all ranks ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_sound_ranks_pass_and_a_damaged_one_is_named(
    world: int, files: Files, tmp_path: Path
) -> None:
    """Plain and NF4 bases, adapters of mixed ranks, quantising at load, self-tests; then damage."""
    oracle = ["--oracle"] if world == 2 else []
    plain = ["--model", str(files.plain), *files.lora]
    nf4 = ["--model", str(files.nf4), "--lora", f"other={files.nf4_adapter}"]
    self_test = ["--self-test", "--rounds=20", "--seed=7"]
    damage = [world - 1, "layers.1.self_attn.q_proj.weight"]
    jobs = [
        {"argv": [*plain, *self_test, *oracle], "damage": None},
        {"argv": [*nf4, *self_test, *oracle], "damage": None},
        {"argv": ["--model", str(files.plain), "--quantize=nf4", *oracle], "damage": None},
        {"argv": [*nf4, "--dtype=bfloat16"], "damage": damage},
    ]
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps(jobs))
    done = start(world, SEVERAL, str(file))
    assert done.returncode == 1, done.stdout + done.stderr
    *sound, damaged = reports(done)
    for rank in range(world):
        codes = json.loads(Path(f"{file}.{rank}").read_text())
        assert codes == [0, 0, 0, 1], done.stdout
    assert [report["ok"] for report in sound] == [True, True, True]
    assert all(report["world"] == world for report in (*sound, damaged))
    for report in sound[:2]:
        assert len(report["self_test"]["rounds"]) == 20
        damaged_kinds = {each["kind"] for each in report["self_test"]["rounds"]}
        assert {Kind.LORA_A, Kind.LORA_B, Kind.SCALE, Kind.EMBEDDING, Kind.NORM} <= damaged_kinds
        assert {Kind.REPLACED, Kind.REPLACED_IDS} <= damaged_kinds
    kinds = ({Kind.LORA_BIAS, Kind.TOKEN_ROWS}, {Kind.GAIN})
    for report, some in zip(sound[:2], kinds, strict=True):
        assert some <= {each["kind"] for each in report["self_test"]["rounds"]}
    checks = {check["name"]: check for check in sound[0]["checks"]}
    assert (checks["greedy tokens"]["elements"] == 6 * 32) if world > 1 else True
    assert ("oracle logits" in checks) == (world == 2)
    cut = cut_model(ModelSpec.from_directory(files.nf4).dims(), world)[-1]
    (named,) = (m for m in damaged["mismatches"] if m["rank"] is not None)
    index = f"[{cut.layers[1].q_heads.start * 16}, 0]"
    assert (named["rank"], named["index"]) == (world - 1, index)
    assert (named["tensor"], named["check"]) == (f"model.{damage[1]}", "NF4 codes")


@pytest.mark.slow
def test_the_demo_model_passes_on_two_ranks(tmp_path: Path) -> None:
    model = cache_root() / "smollm2-135m-instruct-nf4"
    if not model.is_dir():
        pytest.skip("the demo's model has not been made: make demo-model")
    adapters = ROOT / "launch" / "demo" / "adapters"
    lora = [f"{name}={adapters / name}" for name in ("pirate", "json")]
    file = tmp_path / "report.json"
    options = ["--model", str(model), "--lora", *lora, "--self-test", f"--json={file}"]
    done = start(2, SCRIPT, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    assert report == reports(done)[0]
    codes = next(check for check in report["checks"] if check["name"] == "NF4 codes")
    assert codes["tensors"] == 210 and codes["elements"] >= 106_168_320


# --- one rank, in this process -----------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(files: Files) -> Iterator[tuple[Loaded, list[Entry]]]:
    options = read_options(["--model", str(files.nf4), "--lora", f"other={files.nf4_adapter}"])
    joined = join(options.engine)
    adapters: dict[str, AdapterRevision] = {}
    read_adapters(joined, adapters.__setitem__)
    batch = Batch.of("base", adapters, vocab=200, positions=64)
    rank = load(joined, adapters, batch)
    with Checkpoint.open(files.nf4) as checkpoint:
        yield rank, run._entries(rank, adapters, checkpoint)


def test_every_tensor_of_the_checkpoint_is_compared(
    files: Files, loaded: tuple[Loaded, list[Entry]]
) -> None:
    with Checkpoint.open(files.nf4) as checkpoint:
        stems = (".absmax", ".quant_map", ".nested_", ".quant_state")
        stored = {name for name in checkpoint.names if not any(stem in name for stem in stems)}
    base = {entry.name for entry in loaded[1] if ":" not in entry.name}
    assert base == stored


def test_every_kind_of_damage_is_named_at_world_size_1(
    loaded: tuple[Loaded, list[Entry]],
) -> None:
    entries = loaded[1]
    comm = Comm.alone(CPU)
    result, parts = check_tensors(comm, entries)
    assert not result.mismatches
    test = run_self_test(comm, entries, parts, seed=3, rounds=60)
    assert test.ok, [each for each in test.rounds if not each.ok]
    elsewhere = {Kind.HEAD, Kind.DENSE, Kind.COPY, Kind.LORA_BIAS, Kind.TOKEN_ROWS}
    assert {each.kind for each in test.rounds} == set(Kind) - NEVER - elsewhere


@pytest.mark.parametrize("world", [1, 2])
def test_every_kind_of_damage_is_named_in_weights_packed_for_the_gpu(
    world: int, tmp_path: Path
) -> None:
    """Widths of whole blocks, rows that are no multiple of a tile."""
    sizes = {"hidden_size": 192, "intermediate_size": 320, "vocab_size": 200, "head_dim": 24}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    model = make_checkpoint(tmp_path, "llama", nf4=True, **sizes, **heads)
    spec, comm = ModelSpec.from_directory(model), Comm.alone(CPU)
    cut = cut_model(spec.dims(), world)[-1]
    weights = load_weights(spec, model, cut, dtype=torch.bfloat16, device=CPU)
    for i, layer in enumerate(weights.layers):
        weights.layers[i] = dataclasses.replace(
            layer,
            qkv=tuple(gpu.prepare(w, torch.bfloat16) for w in layer.qkv),
            gate_up=tuple(gpu.prepare(w, torch.bfloat16) for w in layer.gate_up),
            down=gpu.prepare(layer.down, torch.bfloat16),
        )
    with Checkpoint.open(model) as checkpoint:
        source = WholeSource(checkpoint, torch.bfloat16, quantize=False)
        entries = base_entries(weights, cut, spec.dims(), source, tied=spec.tie_word_embeddings)
        quantized = [entry for entry in entries if "NF4" in entry.kind]
        assert sum(isinstance(entry.live.shard.weight, PackedNF4) for entry in quantized) >= 24
        test = run_self_test(
            comm, quantized, [[entry.part for entry in quantized]], seed=world, rounds=60
        )
    assert test.ok, [each for each in test.rounds if not each.ok]
    assert {Kind.CODES, Kind.ABSMAX} <= {each.kind for each in test.rounds}


class Blind:
    """A comparison's live side that looks at the files instead of the rank."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    def read(self, rows: Span) -> torch.Tensor:
        """What the files say."""
        return self._entry.whole(rows)

    def cell(self, row: int, col: int) -> Any:
        """Of the rank."""
        return self._entry.live.cell(row, col)


def test_the_self_test_fails_when_the_comparison_is_blind(
    loaded: tuple[Loaded, list[Entry]],
) -> None:
    comm = Comm.alone(CPU)
    norms = [entry for entry in loaded[1] if entry.kind is Kind.NORM]
    blind = [dataclasses.replace(entry, live=Blind(entry)) for entry in norms]
    _, parts = check_tensors(comm, norms)
    assert run_self_test(comm, norms, parts, seed=1, rounds=3).ok
    test = run_self_test(comm, blind, parts, seed=1, rounds=3)
    assert not test.ok and not any(each.ok for each in test.rounds)


def test_a_shard_of_another_rank_is_refused_everywhere(files: Files) -> None:
    """Sizes fit, contents do not: the heads are those of the next rank."""
    spec = ModelSpec.from_directory(files.nf4)
    right, other = cut_model(spec.dims(), 3)[:2]
    heads = [
        dataclasses.replace(mine, q_heads=theirs.q_heads, kv_heads=theirs.kv_heads)
        for mine, theirs in zip(right.layers, other.layers, strict=True)
    ]
    wrong = dataclasses.replace(right, layers=tuple(heads))
    weights = load_weights(spec, files.nf4, wrong, dtype=torch.float32, device=CPU)
    with Checkpoint.open(files.nf4) as checkpoint:
        source = WholeSource(checkpoint, torch.float32, quantize=False)
        entries = base_entries(weights, right, spec.dims(), source, tied=True)
        found = {(e.kind, e.name): compare(e) for e in entries}
    query = found[Kind.CODES, "model.layers.0.self_attn.q_proj.weight"]
    assert query.mismatches > query.elements // 2
    assert query.first == (right.layers[0].q_heads.start * 16, 0)
    output = found[Kind.CODES, "model.layers.0.self_attn.o_proj.weight"]
    assert output.mismatches > output.elements // 2
    assert found[Kind.BIAS, "model.layers.0.self_attn.k_proj.bias"].mismatches
    assert not any(outcome.mismatches for (_, name), outcome in found.items() if "attn" not in name)


def test_a_tensor_that_no_rank_holds_is_named(files: Files) -> None:
    spec = ModelSpec.from_directory(files.nf4)
    (whole,) = cut_model(spec.dims(), 1)
    weights = load_weights(spec, files.nf4, whole, dtype=torch.float32, device=CPU)
    weights.layers[1] = dataclasses.replace(weights.layers[1], qkv_bias=None)
    with Checkpoint.open(files.nf4) as checkpoint:
        source = WholeSource(checkpoint, torch.float32, quantize=False)
        with pytest.raises(LiveError, match=r"nothing of .*layers\.1\.self_attn\.q_proj\.bias"):
            base_entries(weights, whole, spec.dims(), source, tied=True)


def test_a_shard_of_another_size_or_kind_is_refused(files: Files) -> None:
    spec = ModelSpec.from_directory(files.nf4)
    (whole,), (half, _) = cut_model(spec.dims(), 1), cut_model(spec.dims(), 2)
    weights = load_weights(spec, files.nf4, whole, dtype=torch.float32, device=CPU)
    with Checkpoint.open(files.nf4) as checkpoint:
        source = WholeSource(checkpoint, torch.float32, quantize=False)
        with pytest.raises(LiveError, match=r"embed_tokens.*need .*\[\d+, 96\]"):
            base_entries(weights, half, spec.dims(), source, tied=True)
    with Checkpoint.open(files.plain) as checkpoint:
        source = WholeSource(checkpoint, torch.float32, quantize=False)
        with pytest.raises(LiveError, match="holds a NF4 weight, must be plain"):
            base_entries(weights, whole, spec.dims(), source, tied=True)


def test_a_damaged_record_counts_as_wrong_rows(loaded: tuple[Loaded, list[Entry]]) -> None:
    rank, entries = loaded
    descriptors = rank.rank.worker.runner.arena.descriptors
    (start_of,) = rank.descriptors.values()
    entry = next(e for e in entries if e.kind is Kind.LORA_A)
    kept = int(descriptors[start_of])
    for word in (kept ^ 1, kept | 1 << 60, -kept):  # the rank, and where the offsets are
        descriptors[start_of] = word
        outcome = compare(entry)
        assert outcome.mismatches == outcome.elements and outcome.first == (0, 0)
    descriptors[start_of] = kept
    assert not compare(entry).mismatches


@pytest.mark.parametrize("module", ["mlp.down_proj", "self_attn.k_proj"])
def test_the_whole_is_what_bitsandbytes_reads(module: str, files: Files) -> None:
    name = f"model.layers.1.{module}.weight"
    with Checkpoint.open(files.nf4) as checkpoint:
        whole = WholeSource(checkpoint, torch.float32, quantize=False).packed(name)
        parts = {
            key.removeprefix(f"{name}."): checkpoint.read(key)
            for key in checkpoint.names
            if key.startswith(f"{name}.")
        }
        state = bitsandbytes.functional.QuantState.from_dict(parts, device=CPU)
        right = _values(bitsandbytes, checkpoint.read(name), state)
        last = whole.shape[0]
        for rows in (Span(0, last), Span(1, 2), Span(37, last)):
            values = whole.values(rows, torch.float32)
            assert torch.equal(values.view(torch.int32), right[rows.slice].view(torch.int32))


# --- pieces ------------------------------------------------------------------------------------


def spans(limit: int) -> st.SearchStrategy[Span]:
    """Spans within a limit, empty ones too."""
    ends = st.tuples(st.integers(0, limit), st.integers(0, limit))
    return ends.map(lambda pair: Span(min(pair), max(pair)))


@given(st.lists(st.builds(WeightSlice, rows=spans(5), cols=spans(6)), max_size=6))
def test_a_gap_is_the_first_element_that_no_part_covers(parts: list[WeightSlice]) -> None:
    covered = torch.zeros(5, 6, dtype=torch.bool)
    for part in parts:
        covered[part.rows.slice, part.cols.slice] = True
    gaps = (~covered).nonzero().tolist()
    assert first_gap((5, 6), parts) == (tuple(gaps[0]) if gaps else None)


def test_a_part_that_no_rank_holds_is_reported(loaded: tuple[Loaded, list[Entry]]) -> None:
    entry = next(e for e in loaded[1] if e.kind is Kind.EMBEDDING)
    short = WeightSlice(rows=Span(0, 199), cols=entry.part.cols)
    result, _ = check_tensors(Comm.alone(CPU), [dataclasses.replace(entry, part=short)])
    (mismatch,) = result.mismatches
    assert (mismatch.check, mismatch.index, mismatch.rank) == ("coverage", "[199, 0]", None)


def test_one_wrong_row_and_one_slightly_wrong_sequence_are_beyond_tolerance() -> None:
    limit = TOLERANCES["bfloat16"]
    right = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    assert row_errors(right, right, [8, 12]).beyond(EXACT)[0] == 0
    wrong = right.clone()
    wrong[13] = right[12]
    assert row_errors(wrong, right, [8, 12]).beyond(limit)[:2] == (1, 13)
    assert row_errors(right * (1 + 0.5 * limit.median), right, [8, 12]).beyond(limit)[0] == 0
    wrong = right.clone()
    wrong[:8] *= 1 + 2 * limit.median  # within `worst`
    assert row_errors(wrong, right, [8, 12]).beyond(limit)[:2] == (8, 0)
    wrong[19, 3] = torch.nan
    assert row_errors(wrong, right, [8, 12]).largest == torch.inf


def token_check(chosen: list[int]) -> TokenCheck:
    """Of one sequence of a prompt of one token and as many new tokens as chosen."""
    batch = Batch(names=("base",), digests=("",), prompts=([0],), new_tokens=len(chosen))
    return TokenCheck("greedy tokens", batch, [chosen], TOLERANCES["float32"])


def test_tokens_may_differ_at_near_ties_only() -> None:
    logits = torch.tensor([[0.0, 10.0, 5.0], [10.0, 0.0, 9.9999], [1.0, 0.0, 10.0]])
    check = token_check([1, 2, 2])
    check.add([0], logits)
    assert not check.result().mismatches
    check.compare_runs([[1, 0, 1]])  # apart from the near-tie on
    assert not check.result().mismatches
    check.compare_runs([[2, 2, 2]])  # apart before it
    assert [m.index for m in check.result().mismatches] == ["generated token 0"]
    wrong = token_check([2, 2, 2])
    wrong.add([0], logits)
    (mismatch,) = wrong.result().mismatches
    assert "token 2 instead of 1" in mismatch.detail


def test_too_many_near_ties_are_refused() -> None:
    logits = torch.tensor([[10.0, 0.0, 9.9999]]).repeat(50, 1)
    tied = token_check([2] + [0] * 49)
    tied.add([0], logits)
    assert not tied.result().mismatches
    tied = token_check([2, 2] + [0] * 48)
    tied.add([0], logits)
    assert "2 tokens differ by near-ties, 1 may" in tied.result().mismatches[0].detail


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--dtype=int8"], "dtype='int8'"),
        (["--lora", "name"], "lora='name'"),
        (["--rounds=0"], "--rounds: 0"),
        (["--json=/no/such/file"], "--json: /no/such/file cannot be written"),
        (["--port=1"], "--port=1"),
    ],
)
def test_options_that_cannot_be_used_are_named(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        read_options(["--model=x", *options])
    assert exit_.value.code == 2
    assert named in capsys.readouterr().err


def test_prompts_are_the_same_on_every_rank_and_fit_a_short_context() -> None:
    batch = Batch.of("base", {}, vocab=50, positions=8)
    assert batch == Batch.of("base", {}, vocab=50, positions=8)
    assert batch.lengths == [8] and batch.new_tokens == 6
    draw = random.Random(0)
    assert batch.prompts == ([draw.randrange(50), draw.randrange(50)],)
