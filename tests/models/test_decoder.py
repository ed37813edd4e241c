"""The sharded forward pass equals transformers on the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import ops_for
from tests.helpers.tiny_models import (
    KINDS,
    make_checkpoint,
    make_peft_adapter,
    oracle_greedy,
    oracle_logits,
)
from tests.models.shards import Adapter, Shards

TOLERANCE = 1e-4  # of the range of the oracle's logits, float32


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a checkpoint once per set of arguments."""
    made: dict[str, Path] = {}

    def make(kind: Any, **options: Any) -> Path:
        key = f"{kind} {sorted(options.items())}"
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp("model") / "m", kind, **options)
        return made[key]

    return make


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 128, (count,), generator=generator).tolist()


def assert_equal_logits(got: torch.Tensor, want: torch.Tensor) -> None:
    spread = float(want.max() - want.min())
    assert spread > 5  # else the comparison would say little
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE * spread)
    best, second = want.topk(2).values.unbind(1)
    clear = best - second > 2 * TOLERANCE * spread
    assert (~clear).sum() <= 1 + len(clear) // 100
    assert torch.equal(got.argmax(1)[clear], want.argmax(1)[clear])


def check(directory: Path, world: int, lengths: tuple[int, ...] = (23, 1, 9), **load: Any) -> None:
    sequences = [tokens(length, seed) for seed, length in enumerate(lengths)]
    results = Shards(directory, world, **load).logits(sequences)
    for sequence, result in zip(sequences, results, strict=True):
        assert_equal_logits(result, oracle_logits(directory, sequence))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("nf4", [False, True], ids=["plain", "nf4"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(
    checkpoint: Callable[..., Path], kind: str, nf4: bool, world: int
) -> None:
    check(checkpoint(kind, nf4=nf4), world)


@pytest.mark.parametrize("world", [5, 7])
def test_ranks_without_units_of_a_module_join(checkpoint: Callable[..., Path], world: int) -> None:
    directory = checkpoint("qwen2", num_hidden_layers=1, nf4=True)
    cuts = Shards(directory, world).cuts
    assert any(cut.q_heads == (0,) for cut in cuts)
    assert any(cut.mlp_widths == (0,) for cut in cuts)
    assert any(cut.vocab.size == 0 for cut in cuts)
    check(directory, world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_odd_sizes(checkpoint: Callable[..., Path], world: int) -> None:
    sizes = {
        "hidden_size": 72,
        "intermediate_size": 100,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 131,
    }
    check(checkpoint("llama", nf4=True, **sizes), world)
    check(checkpoint("llama", **sizes), world)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "nf4": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"head_dim": 24}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"sharded": True, "rms_norm_eps": 1e-3}),
        ("mistral", {"head_dim": 8, "sliding_window": None}),
        ("qwen2", {"tie_word_embeddings": True, "nf4": True}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_config_fields_are_applied(
    checkpoint: Callable[..., Path], kind: str, options: dict[str, Any], world: int
) -> None:
    check(checkpoint(kind, **options), world)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_variants_beyond_the_original_context(
    checkpoint: Callable[..., Path], rope: dict[str, Any]
) -> None:
    parameters = {"rope_theta": 100.0, **rope}
    directory = checkpoint("llama", rope_parameters=parameters, max_position_embeddings=64)
    check(directory, 2, lengths=(60, 3))


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(
    ("kind", "options", "windows"),
    [
        ("mistral", {"sliding_window": 7}, (7, 7)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
            (None, 5),
        ),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (6, None),
        ),
    ],
    ids=["mistral", "qwen2", "qwen3"],
)
def test_prompts_beyond_the_sliding_window(
    checkpoint: Callable[..., Path],
    kind: str,
    options: dict[str, Any],
    windows: tuple[int | None, ...],
    world: int,
) -> None:
    directory = checkpoint(kind, **options)
    assert Shards(directory, 1).spec.windows == windows
    check(directory, world, lengths=(40, 4))


def test_greedy_decoding_equals_transformers(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("llama", nf4=True)
    prompt = tokens(9)
    output = oracle_greedy(directory, prompt, 40)
    (logits,) = Shards(directory, 2).logits([prompt + output[:-1]], chunks=(9, *[1] * 40))
    assert logits[len(prompt) - 1 :].argmax(1).tolist() == output


@pytest.mark.parametrize("skipped", [["v_proj", "lm_head"], ["up_proj"]], ids=["v", "up"])
def test_modules_that_quantisation_skipped(
    checkpoint: Callable[..., Path], skipped: list[str]
) -> None:
    directory = checkpoint("llama", nf4=True, skip_modules=tuple(skipped))
    layer = Shards(directory, 1).weights[0].layers[0]
    assert (len(layer.qkv), len(layer.gate_up)) == ((3, 1) if "v_proj" in skipped else (1, 2))
    check(directory, 3)


@pytest.mark.parametrize(
    "options",
    [
        {"double_quant": False},
        {"quant_storage": torch.bfloat16},
        {"quant_storage": torch.float32, "dtype": torch.bfloat16},
    ],
    ids=["single", "bf16-storage", "fp32-storage"],
)
def test_nf4_variants(checkpoint: Callable[..., Path], options: dict[str, Any]) -> None:
    check(checkpoint("qwen2", nf4=True, **options), 3)


def test_prepared_weights_change_nothing(checkpoint: Callable[..., Path]) -> None:
    check(checkpoint("llama", nf4=True), 2, ops=ops_for(torch.device("cpu")))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_deterministic_rows_do_not_depend_on_the_batch(
    checkpoint: Callable[..., Path], kind: str
) -> None:
    shards = Shards(checkpoint(kind, nf4=True), 2, deterministic=True)
    sequences = [tokens(length, seed) for seed, length in enumerate((23, 9, 30))]
    together = shards.logits(sequences, chunks=(7, 1, 1, 1000))
    for sequence, result in zip(sequences, together, strict=True):
        assert torch.equal(shards.logits([sequence], chunks=(1000,))[0], result)
        assert torch.equal(shards.logits([sequence], chunks=(1,) * 30)[0], result)
    check(checkpoint(kind, nf4=True), 2, deterministic=True)


def test_bfloat16_checkpoint_in_bfloat16(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("llama", dtype=torch.bfloat16)
    sequence = tokens(12)
    (got,) = Shards(directory, 2, dtype=torch.bfloat16).logits([sequence])
    want = oracle_logits(directory, sequence)
    error = (got - want).abs().mean() / want.std()
    assert 0 < error < 0.05


def test_only_wanted_rows_get_logits(checkpoint: Callable[..., Path]) -> None:
    shards = Shards(checkpoint("llama"), 2)
    sequence = tokens(12)
    (every,) = shards.logits([sequence], chunks=(12,))
    (some,) = shards.logits([sequence], chunks=(12,), wanted=lambda rows: [rows - 1, 3])
    torch.testing.assert_close(some, every[[11, 3]], rtol=1e-5, atol=1e-5)
    (none,) = shards.logits([sequence], chunks=(12,), wanted=lambda rows: [])
    assert none.shape == (0, 128)


@pytest.fixture(scope="module")
def adapters(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """Adapters of mixed ranks and targets for the tiny Llama."""
    kinds: list[dict[str, Any]] = [
        {"r": 4, "alpha": 8},
        {"r": 1, "alpha": 2, "targets": ["q_proj", "down_proj"]},
        {"r": 24, "alpha": 8, "rslora": True, "layers": [1]},
    ]
    root = tmp_path_factory.mktemp("adapters")
    return [
        make_peft_adapter(root / str(seed), checkpoint("llama"), seed=seed, **kind)
        for seed, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("nf4", [False, True], ids=["plain", "nf4"])
def test_mixed_adapters_equal_peft(
    checkpoint: Callable[..., Path], adapters: list[Path], nf4: bool, world: int
) -> None:
    directory = checkpoint("llama", nf4=nf4)
    order = [adapters[0], None, adapters[1], adapters[2], None, adapters[0]]
    sequences = [tokens(length, seed) for seed, length in enumerate((9, 12, 1, 17, 5, 8))]
    loaded = [None if path is None else Adapter.read(path, 2) for path in order]
    results = Shards(directory, world).logits(sequences, loaded)
    for sequence, path, result in zip(sequences, order, results, strict=True):
        want = oracle_logits(directory, sequence, path)
        assert_equal_logits(result, want)
        if path is not None:
            assert (want - oracle_logits(directory, sequence)).abs().max() > 0.05


def test_base_rows_keep_their_bits_beside_adapters(
    checkpoint: Callable[..., Path], adapters: list[Path]
) -> None:
    shards = Shards(checkpoint("llama"), 2)
    sequences = [tokens(9, 0), tokens(9, 1)]
    alone = shards.logits(sequences)
    mixed = shards.logits(sequences, [Adapter.read(adapters[0], 2), None])
    assert torch.equal(mixed[1], alone[1])
    assert not torch.equal(mixed[0], alone[0])
