"""Loading: exact shards, exact names, bounded memory."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kernels.dispatch import ops_for
from kernels.nf4 import DenseWeight, NF4Weight, Weight
from sharding import CheckpointError, cut_model
from tests.helpers.tiny_models import load_oracle, make_checkpoint
from tp_engine.models import ModelSpec
from tp_engine.weights import LayerWeights, RankWeights, WeightError, load_weights

CPU = torch.device("cpu")
OPS = ops_for(CPU)
ODD = {
    "hidden_size": 72,
    "intermediate_size": 200,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


def load(
    directory: Path, world: int = 1, dtype: torch.dtype = torch.float32, **options: Any
) -> list[RankWeights]:
    spec = ModelSpec.from_directory(directory)
    return [
        load_weights(spec, directory, cut, dtype=dtype, device=CPU, **options)
        for cut in cut_model(spec.dims(), world)
    ]


def values(*weights: Weight) -> torch.Tensor:
    """De-quantised [N, K]."""
    return torch.cat(
        [
            OPS.dequantize(w, torch.float32) if isinstance(w, NF4Weight) else w.weight
            for w in weights
        ]
    )


def whole(directory: Path, ranks: list[RankWeights], layer: int) -> dict[str, torch.Tensor]:
    """Unsharded weights of one layer, put together from all ranks; replicas must be equal."""
    spec = ModelSpec.from_directory(directory)
    dims = spec.dims()
    out: dict[str, torch.Tensor] = {}

    def put(name: str, shape: tuple[int, int], rows: slice, cols: slice, part: Any) -> None:
        target = out.setdefault(name, torch.full(shape, float("nan")))
        old = target[rows, cols]
        assert torch.equal(old.nan_to_num(), part) or bool(old.isnan().all())
        target[rows, cols] = part

    every = slice(None)
    for cut, weights in zip(cut_model(dims, len(ranks)), ranks, strict=True):
        held, tensors = cut.layers[layer], weights.layers[layer]
        width, hidden, inner = dims.head_dim, dims.hidden, dims.intermediate
        q, kv = held.q_heads.times(width), held.kv_heads.times(width)
        parts = values(*tensors.qkv).split([q.size, kv.size, kv.size])
        put("q_proj", (dims.heads * width, hidden), q.slice, every, parts[0])
        put("k_proj", (dims.kv_heads * width, hidden), kv.slice, every, parts[1])
        put("v_proj", (dims.kv_heads * width, hidden), kv.slice, every, parts[2])
        put("o_proj", (hidden, dims.heads * width), every, q.slice, values(tensors.o))
        gate, up = values(*tensors.gate_up).split([held.mlp.size] * 2)
        put("gate_proj", (inner, hidden), held.mlp.slice, every, gate)
        put("up_proj", (inner, hidden), held.mlp.slice, every, up)
        put("down_proj", (hidden, inner), every, held.mlp.slice, values(tensors.down))
    return out


def oracle(directory: Path, layer: int) -> dict[str, torch.Tensor]:
    model = load_oracle(directory)
    modules = model.model.layers[layer].named_modules()
    return {n.split(".")[-1]: m.weight.data for n, m in modules if isinstance(m, torch.nn.Linear)}


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "options", [{}, {"double_quant": False}, {"skip_modules": ["k_proj", "gate_proj"]}], ids=str
)
def test_shards_of_quantised_weights_equal_bitsandbytes(
    tmp_path: Path, options: dict[str, Any], world: int
) -> None:
    directory = make_checkpoint(tmp_path / "m", "llama", nf4=True, **options, **ODD)
    ranks = load(directory, world)
    for layer in range(2):
        expected = oracle(directory, layer)
        found = whole(directory, ranks, layer)
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("world", [1, 3])
def test_quantising_while_loading_equals_bitsandbytes(tmp_path: Path, world: int) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", **ODD)
    packed = make_checkpoint(tmp_path / "nf4", "llama", nf4=True, double_quant=False, **ODD)
    ranks = load(plain, world, quantize="nf4")
    assert isinstance(ranks[0].lm_head, DenseWeight)
    for name, tensor in whole(plain, ranks, 1).items():
        assert torch.equal(tensor, oracle(packed, 1)[name]), name


def test_quantising_keeps_what_is_quantised_already(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "m", "qwen2", nf4=True, skip_modules=["v_proj"])
    (weights,) = load(directory, quantize="nf4")
    assert len(weights.layers[0].qkv) == 1
    assert torch.equal(whole(directory, [weights], 0)["q_proj"], oracle(directory, 0)["q_proj"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_prepared_copies_hold_the_values_of_the_weights(
    tmp_path: Path, dtype: torch.dtype, deterministic: bool
) -> None:
    directory = make_checkpoint(tmp_path / "m", "llama", nf4=True)
    ops = ops_for(torch.device("cpu"), deterministic=deterministic)
    (weights,) = load(directory, dtype=dtype, ops=ops)
    (qkv,) = weights.layers[0].qkv
    assert isinstance(qkv, NF4Weight) and qkv.dense is not None
    assert qkv.dense.dtype == dtype
    assert torch.equal(qkv.dense.to_dense(), OPS.dequantize(qkv, dtype))
    head = weights.lm_head
    assert isinstance(head, DenseWeight)
    assert head.fast is None or torch.equal(head.fast.to_dense(), head.weight)
    assert load(directory)[0].layers[0].down.dense is None  # type: ignore[union-attr]


def test_plain_tensors_are_cast_and_tied_ones_shared(tmp_path: Path) -> None:
    directory = make_checkpoint(
        tmp_path / "m", "qwen3", dtype=torch.bfloat16, tie_word_embeddings=True
    )
    (weights,) = load(directory, dtype=torch.float16)
    layer: LayerWeights = weights.layers[0]
    assert layer.q_norm is not None
    assert {layer.q_norm.dtype, weights.embedding.dtype, weights.norm.dtype} == {torch.float16}
    assert isinstance(weights.lm_head, DenseWeight)
    assert weights.lm_head.weight is weights.embedding


Change = Callable[[dict[str, torch.Tensor]], None]
Q = "model.layers.0.self_attn.q_proj.weight"


def _set(name: str, tensor: torch.Tensor) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensor

    return change


def _drop(name: str) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return change


def _poison(name: str, value: float) -> Change:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    return change


def edit(directory: Path, change: Change) -> None:
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_drop(Q), Q),
        (_drop("model.norm.weight"), "model.norm.weight"),
        (_drop("lm_head.weight"), "lm_head.weight"),
        (_set("model.layers.2.mlp.up_proj.weight", torch.ones(2, 2)), "model.layers.2.mlp.up_proj"),
        (_set(Q.replace("weight", "bias"), torch.ones(64)), "q_proj.bias"),
        (_set(Q + ".absmax", torch.ones(64)), Q),
        (_set("xmodel.norm.weight", torch.ones(64)), "xmodel.norm.weight"),
        (_set(Q, torch.ones(64, 63)), r"\[64, 63\].*\[64, 64\]"),
        (_set(Q, torch.ones(64 * 64)), r"\[4096\].*\[64, 64\]"),
        (_set("model.norm.weight", torch.ones(65)), r"\[65\].*\[64\]"),
        (_set(Q, torch.ones(64, 64, dtype=torch.int8)), "int8"),
        (_set(Q, torch.ones(64, 64).to(torch.float8_e4m3fn)), "float8_e4m3fn"),
        (_poison(Q, float("nan")), Q + ".*NaN"),
        (_poison("model.norm.weight", float("inf")), "model.norm.weight.*infinity"),
        (_poison("lm_head.weight", float("-inf")), "lm_head.weight.*infinity"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_tensors_are_refused_by_name(tmp_path: Path, change: Change, named: str) -> None:
    directory = make_checkpoint(tmp_path / "m", "llama")
    load(directory)
    edit(directory, change)
    with pytest.raises((WeightError, CheckpointError), match=named):
        load(directory)


@pytest.mark.parametrize("change", [_drop(Q + ".absmax"), _set(Q + ".extra", torch.ones(1))])
def test_wrong_parts_of_quantised_weights_are_refused_by_name(
    tmp_path: Path, change: Change
) -> None:
    directory = make_checkpoint(tmp_path / "m", "llama", nf4=True)
    edit(directory, change)
    with pytest.raises((WeightError, CheckpointError), match=Q):
        load(directory)


def test_quantised_shape_is_checked_against_the_configuration(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "m", "llama", nf4=True)
    other = make_checkpoint(tmp_path / "o", "llama", nf4=True, num_attention_heads=8, head_dim=16)
    (directory / "config.json").write_text((other / "config.json").read_text())
    with pytest.raises(WeightError, match=r"q_proj.*\[64, 64\].*\[128, 64\]"):
        load(directory)


def test_overflow_of_the_compute_dtype_is_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "m", "llama", dtype=torch.bfloat16)
    edit(directory, _poison(Q, 1e6))
    load(directory, dtype=torch.bfloat16)
    with pytest.raises(WeightError, match=Q + ".*float16"):
        load(directory, dtype=torch.float16)


def test_values_that_cannot_be_quantised_are_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "m", "llama")
    edit(directory, _poison(Q, float("nan")))
    with pytest.raises(WeightError, match=Q):
        load(directory, quantize="nf4")


def test_known_buffers_of_older_files_are_accepted(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "m", "llama")
    edit(directory, _set("model.layers.1.self_attn.rotary_emb.inv_freq", torch.ones(8)))
    load(directory)
    edit(directory, _set("model.layers.2.self_attn.rotary_emb.inv_freq", torch.ones(8)))
    with pytest.raises(WeightError, match=r"layers\.2\.self_attn\.rotary_emb"):
        load(directory)


@pytest.mark.parametrize("world", [1, 3])
def test_a_copy_of_a_tied_head_must_be_equal(tmp_path: Path, world: int) -> None:
    directory = make_checkpoint(tmp_path / "m", "llama", tie_word_embeddings=True)
    embedding = load_file(directory / "model.safetensors")["model.embed_tokens.weight"]
    edit(directory, _set("lm_head.weight", embedding.clone()))
    load(directory, world)
    edit(directory, _poison("lm_head.weight", 7.0))
    with pytest.raises(WeightError, match="tie_word_embeddings"):
        load(directory, world)


PROBE = """
import json, sys, threading, time
import torch
from pathlib import Path
from sharding import cut_model
from tp_engine.models import ModelSpec
from tp_engine.weights import load_weights

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith("RssAnon")) * 1024

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.0005)

directory, quantize = Path(sys.argv[1]), sys.argv[2] or None
spec = ModelSpec.from_directory(directory)
cut = cut_model(spec.dims(), 2)[0]
peak, done, before = 0, False, anonymous()
thread = threading.Thread(target=watch)
thread.start()
weights = load_weights(
    spec, directory, cut, dtype=torch.float32, device=torch.device("cpu"), quantize=quantize
)
done = True
thread.join()
print(json.dumps({"peak": peak - before, "after": anonymous() - before}))
"""


LARGEST = 512 * 2048 * 4  # bytes of the largest tensor below
OWN = 4 * 2**20  # bytes that a process takes on the first use of anything, more or less of them


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A checkpoint of many tensors, and the bytes of half of it."""
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        architectures=["LlamaForCausalLM"],
    )
    with torch.device("meta"):
        shapes = transformers.LlamaForCausalLM(config).state_dict()
    tensors = {name: torch.linspace(-1, 1, t.numel()).view(t.shape) for name, t in shapes.items()}
    directory = tmp_path_factory.mktemp("large")
    config.save_pretrained(directory)
    save_file(tensors, directory / "model.safetensors")
    return directory, sum(t.nbytes for t in tensors.values()) // 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("quantize", ["", "nf4"])
def test_peak_memory_is_the_shard_and_about_one_tensor(
    large: tuple[Path, int], quantize: str
) -> None:
    directory, half = large
    ran = subprocess.run(
        [sys.executable, "-c", PROBE, str(directory), quantize],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    found = json.loads(ran.stdout)
    shard = half / 7 if quantize else half
    assert half > 16 * LARGEST  # else the bound would say little
    assert 0.8 * shard < found["after"] < shard + 4 * LARGEST
    # Quantising a tensor takes several float32 and integer temporaries of its size.
    assert found["peak"] < shard + (8 if quantize else 2) * LARGEST + OWN
