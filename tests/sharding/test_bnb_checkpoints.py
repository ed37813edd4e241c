"""4-bit checkpoints as transformers saves them, cut and put together again."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sharding import SITES, BnbTensor, Checkpoint, ModelDims, assemble, cut_model, weight_slice
from tests.helpers.tiny_models import make_checkpoint
from tests.sharding.bnb_files import truth

# 3 KV groups, widths that are no multiple of the block: 96 = 1.5 blocks, 144 = 2.25 blocks.
SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
}
DIMS = ModelDims(layers=2, hidden=96, intermediate=144, heads=6, kv_heads=3, head_dim=24, vocab=128)


def module_of(site: str) -> str:
    return "mlp" if site in ("gate_proj", "up_proj", "down_proj") else "self_attn"


@pytest.mark.parametrize(
    ("double_quant", "storage", "skip", "sharded"),
    [
        (True, torch.uint8, None, False),
        (False, torch.bfloat16, None, True),
        (True, torch.float16, ["lm_head", "v_proj"], False),
        (True, torch.float32, ["lm_head", "model.layers.1.mlp.down_proj"], True),
    ],
)
def test_every_site_of_every_layer_equals_what_bitsandbytes_loads(
    double_quant: bool,
    storage: torch.dtype,
    skip: list[str] | None,
    sharded: bool,
    tmp_path: Path,
) -> None:
    make_checkpoint(
        tmp_path,
        "llama",
        nf4=True,
        double_quant=double_quant,
        quant_storage=storage,
        skip_modules=skip,
        sharded=sharded,
        **SIZES,
    )
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")
    seen = 0
    with Checkpoint.open(tmp_path) as ckpt:
        for layer in range(DIMS.layers):
            for site in SITES:
                module = f"model.layers.{layer}.{module_of(site)}.{site}"
                linear = oracle.get_submodule(module)
                skipped = not hasattr(linear.weight, "quant_state")
                assert BnbTensor.is_quantized(ckpt, f"{module}.weight") is not skipped
                if not skipped:
                    assert_shards_equal(ckpt, f"{module}.weight", layer, site, linear)
                    seen += 1
        left = {name for name in ckpt.unread if ".weight." in name}
    assert left == set()
    assert seen == {None: 14, "v_proj": 12}.get(skip[1] if skip else None, 13)


def assert_shards_equal(ckpt: Checkpoint, name: str, layer: int, site: str, linear: Any) -> None:
    tensor = BnbTensor.from_checkpoint(ckpt, name)
    expected = truth(linear.weight.data, linear.weight.quant_state)
    assert tensor.shape == tuple(expected.codes.shape)
    for world in range(1, 10):
        shards = []
        for cut in cut_model(DIMS, world):
            s = weight_slice(DIMS, cut.layers[layer], site)
            shards.append((tensor.cut(s.rows, s.cols), s.rows, s.cols))
        assert assemble(tensor.shape, shards).equal(expected)
