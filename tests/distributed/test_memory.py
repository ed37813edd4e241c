"""A rank holds its share of the base, and never more while loading."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

from sharding import cut_model
from tests.distributed.material import Material
from tests.distributed.torchrun import ROOT, Run
from tp_engine.models import ModelSpec

WORLD = 4
SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 16384,
}
MARGIN = 48 << 20
"""Beside the shard: one tensor being cast, what the allocator keeps, the tensors' names."""

LOAD = """
import resource, sys
from pathlib import Path
import torch
from sharding import cut_model
from tp_engine.models import ModelSpec
from tp_engine.weights import load_weights
directory, world, rank, budget = Path(sys.argv[1]), *map(int, sys.argv[2:5])
torch.set_num_threads(1)
torch.zeros(4) + 1
spec = ModelSpec.from_directory(directory)
cut = cut_model(spec.dims(), world)[rank]
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + budget, used + budget))
quantize = "nf4" if sys.argv[5] == "nf4" else None
weights = load_weights(
    spec, directory, cut, dtype=torch.float32, device=torch.device("cpu"), quantize=quantize
)
print(len(weights.layers), cut.vocab.size)
"""


def heaviest_unit(spec: ModelSpec) -> int:
    """Bytes of an attention group, an MLP block and a vocabulary unit of SmolLM2 as NF4: half a
    byte and a sixteenth for a scale an element, a phase a row; float32 in the vocabulary."""
    dims = spec.dims()
    group = dims.heads // dims.kv_heads
    attention = (2 * group + 2) * dims.head_dim * dims.hidden
    mlp = 3 * dims.mlp_unit * dims.hidden
    rows = (group + 2) * dims.head_dim + 2 * dims.mlp_unit + 2 * dims.hidden
    return int((attention + mlp) * (1 / 2 + 4 / 64)) + 4 * rows + 4 * dims.vocab_unit * dims.hidden


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_holds_its_share_of_the_weights_and_at_most_one_unit_more(
    material: Material, run: Callable[[int], Run], world: int
) -> None:
    (whole,) = run(1).result("smol-weights").ranks
    assert whole.weight_bytes > 150e6  # half a byte for 106 M, four for 28 M of the vocabulary
    most = whole.weight_bytes / world + heaviest_unit(ModelSpec.from_directory(Path(material.smol)))
    ranks = run(world).result("smol-weights").ranks
    for report in ranks:
        assert report.weight_bytes <= most
        # The norms are whole on every rank: a tenth of a per cent.
        assert report.norm_bytes == whole.norm_bytes < whole.weight_bytes / 1000
    assert sum(report.weight_bytes for report in ranks) >= whole.weight_bytes


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 Llama of 320 MB, all zeros."""
    path = tmp_path_factory.mktemp("large") / "model"
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tensors = {name: torch.zeros(weight.shape) for name, weight in model.named_parameters()}
    safetensors.torch.save_file(tensors, path / "model.safetensors")
    return path


def load(
    directory: Path, world: int, rank: int, budget: int, quantize: str
) -> "subprocess.CompletedProcess[str]":
    """Load one rank's shard with so many bytes of memory at most."""
    arguments = [str(directory), str(world), str(rank), str(budget), quantize]
    return subprocess.run(
        [sys.executable, "-c", LOAD, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA and /proc")
@pytest.mark.parametrize("quantize", ["", "nf4"])
def test_a_rank_loads_in_memory_that_a_full_copy_would_break(large: Path, quantize: str) -> None:
    size = (large / "model.safetensors").stat().st_size
    assert size > 300e6
    budget = size // WORLD + MARGIN
    assert budget < size // 2
    for rank in (0, WORLD - 1):
        done = load(large, WORLD, rank, budget, quantize)
        assert done.returncode == 0, done.stderr
        vocabulary = cut_model(ModelSpec.from_directory(large).dims(), WORLD)[rank].vocab.size
        assert done.stdout.split() == ["4", str(vocabulary)]


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA and /proc")
def test_the_limit_stops_a_full_copy(large: Path) -> None:
    budget = (large / "model.safetensors").stat().st_size // WORLD + MARGIN
    refused = load(large, 1, 0, budget, "")
    assert refused.returncode != 0
    assert "memory" in refused.stderr.lower()
