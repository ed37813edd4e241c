"""Tiny random checkpoints and adapters, made and read by transformers, bitsandbytes and PEFT.

Legend: T tokens, V vocabulary.

Weights are large enough that the logits spread over several units: near-ties are rare, so greedy
tokens can be compared. Files are the same for the same arguments.
"""

import functools
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# bitsandbytes looks for a distribution called `kernels` and meets this repository's package.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft
    import torch
    import transformers
    from transformers.utils.logging import disable_progress_bar

from tests.helpers.tiny_tokenizer import VOCABULARY, save_tokenizer  # noqa: E402 (after the quiet imports)

disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

Kind = Literal["llama", "mistral", "qwen2", "qwen3"]
KINDS: tuple[Kind, ...] = ("llama", "mistral", "qwen2", "qwen3")
ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def make_checkpoint(
    path: Path,
    kind: Kind,
    *,
    seed: int = 0,
    nf4: bool = False,
    double_quant: bool = True,
    quant_storage: torch.dtype = torch.uint8,
    skip_modules: Sequence[str] | None = None,
    dtype: torch.dtype = torch.float32,
    sharded: bool = False,
    tokenizer: bool = False,
    **config_overrides: Any,
) -> Path:
    """Write a tiny random Hugging Face checkpoint to `path` and return it.

    Hidden 64, MLP 128, 2 layers, 4 heads in 2 KV groups, vocabulary 128 (256 bytes and some more
    with `tokenizer`), 256 positions; Qwen3 heads are 32 wide, so that heads x width is not the
    hidden size. `config_overrides` are fields of the transformers config.

    Args:
        nf4: quantise the layers' linears with bitsandbytes, as transformers saves them.
        double_quant: with `nf4`, quantise the absmax too.
        quant_storage: with `nf4`, the dtype that the packed bytes are viewed as.
        skip_modules: with `nf4`, `llm_int8_skip_modules`.
        dtype: of the tensors that are not quantised.
        sharded: several files and an index.
        tokenizer: also save a byte-level tokenizer with a chat template.
    """
    fields = dict(_DEFAULTS)
    if kind == "qwen3":
        fields["head_dim"] = 32
    if tokenizer:
        fields["vocab_size"] = VOCABULARY
    config = _CONFIGS[kind](**{**fields, **config_overrides})
    limit = "40KB" if sharded else "1GB"
    with _quiet():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise(model, seed)
        model.to(dtype)
        if nf4:
            model = _quantise(model, dtype, double_quant, quant_storage, skip_modules)
        model.save_pretrained(path, max_shard_size=limit)
    if tokenizer:
        save_tokenizer(path)
    return path


def make_peft_adapter(
    path: Path,
    model_dir: Path,
    *,
    r: int = 4,
    alpha: float = 8.0,
    targets: Sequence[str] = ALL_TARGETS,
    seed: int = 0,
    rslora: bool = False,
    rank_pattern: dict[str, int] | None = None,
    alpha_pattern: dict[str, float] | None = None,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    **lora_overrides: Any,
) -> Path:
    """Write a random PEFT LoRA adapter with a non-zero B for the model in `model_dir`.

    Its delta is of the size of the base weights, and what replaces rows or whole modules is of
    theirs. `layers` is `layers_to_transform`; `lora_overrides` are further fields of
    `peft.LoraConfig`.
    """
    config = peft.LoraConfig(
        r=r,
        lora_alpha=alpha,
        target_modules=targets if isinstance(targets, str) else list(targets),
        use_rslora=rslora,
        rank_pattern=rank_pattern or {},
        alpha_pattern=alpha_pattern or {},
        layers_to_transform=None if layers is None else list(layers),
        base_model_name_or_path=str(model_dir),
        task_type="CAUSAL_LM",
        **lora_overrides,
    )
    base_config = transformers.AutoConfig.from_pretrained(model_dir)
    if hasattr(base_config, "quantization_config"):
        del base_config.quantization_config  # shapes are all that is needed
    generator = torch.Generator().manual_seed(seed)
    with _quiet():
        model = transformers.AutoModelForCausalLM.from_config(base_config, dtype=torch.float32)
        adapted = peft.get_peft_model(model, config)
        for name, weight in sorted(adapted.named_parameters()):
            if ".lora_A." in name or ".lora_embedding_B." in name:
                weight.data.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
            elif ".lora_B." in name or ".lora_embedding_A." in name:
                weight.data.normal_(std=0.1, generator=generator)
            elif ".modules_to_save." in name or "trainable_tokens_delta" in name:
                weight.data.normal_(std=0.5, generator=generator)
            elif ".lora_magnitude_vector." in name:
                weight.data.uniform_(1.0, 2.0, generator=generator)
        for weight in adapted.parameters():
            weight.data = weight.data.to(dtype)
        adapted.save_pretrained(str(path), save_embedding_layers=False)
    return path


def load_oracle(
    model_dir: Path, *, adapter: Path | None = None, dtype: torch.dtype = torch.float32
) -> Any:
    """The checkpoint as a transformers model in `dtype` on the CPU, eager attention.

    NF4 linears are de-quantised by bitsandbytes in float32, then cast. `adapter` is applied by
    PEFT, unmerged. Kept for the next call with the same arguments.
    """
    return _load_oracle(str(model_dir), None if adapter is None else str(adapter), dtype)


def oracle_logits(
    model_dir: Path,
    token_ids: Sequence[int],
    adapter: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Logits [T, V] in `dtype` of one sequence."""
    model = load_oracle(model_dir, adapter=adapter, dtype=dtype)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits.clone()


def oracle_greedy(
    model_dir: Path,
    token_ids: Sequence[int],
    count: int,
    adapter: Path | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[int]:
    """The `count` best tokens after `token_ids`, one by one, past any end-of-sequence token."""
    tokens = list(token_ids)
    for _ in range(count):
        logits = oracle_logits(model_dir, tokens, adapter, dtype)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(token_ids) :]


@functools.lru_cache(maxsize=16)
def _load_oracle(model_dir: str, adapter: str | None, dtype: torch.dtype) -> Any:
    with _quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, device_map="cpu", attn_implementation="eager"
        )
        _dequantise(model)
        if adapter is not None:
            model = peft.PeftModel.from_pretrained(model, adapter)
    return model.to(dtype).eval()


def _dequantise(model: torch.nn.Module) -> None:
    """Replace bitsandbytes linears, if any, by plain ones with the same float32 values."""
    if not getattr(model, "is_quantized", False):
        return
    import bitsandbytes  # tests on a GPU have no such model, nor always this package

    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, bitsandbytes.nn.Linear4bit):
                continue
            state = child.weight.quant_state
            state.dtype = torch.float32
            plain = torch.nn.Linear(child.in_features, child.out_features, child.bias is not None)
            packed = child.weight.data
            weight = bitsandbytes.functional.dequantize_4bit(packed, state).reshape(state.shape)
            plain.weight = torch.nn.Parameter(weight, requires_grad=False)
            if child.bias is not None:
                plain.bias = torch.nn.Parameter(child.bias.data.float(), requires_grad=False)
            setattr(parent, name, plain)
    # transformers refuses to cast what it takes for a quantised model.
    model.is_quantized = False  # type: ignore[assignment]
    model.is_loaded_in_4bit = False  # type: ignore[assignment]
    model.quantization_method = None  # type: ignore[assignment]


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter from one generator, in the order of the names."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in sorted(model.named_parameters()):
        if weight.ndim == 1 and name.endswith("norm.weight"):
            weight.data.uniform_(0.5, 1.5, generator=generator)
        elif weight.ndim == 1 or "embed_tokens" in name or "lm_head" in name:
            weight.data.normal_(std=0.5, generator=generator)
        else:
            weight.data.normal_(std=1.5 * weight.shape[1] ** -0.5, generator=generator)


def _quantise(
    model: Any,
    dtype: torch.dtype,
    double_quant: bool,
    quant_storage: torch.dtype,
    skip_modules: Sequence[str] | None,
) -> Any:
    scratch = tempfile.mkdtemp()
    try:
        model.save_pretrained(scratch)
        quantisation = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=double_quant,
            bnb_4bit_quant_storage=quant_storage,
            bnb_4bit_compute_dtype=dtype,
            llm_int8_skip_modules=None if skip_modules is None else list(skip_modules),
        )
        return transformers.AutoModelForCausalLM.from_pretrained(
            scratch, quantization_config=quantisation, dtype=dtype, device_map="cpu"
        )
    finally:
        shutil.rmtree(scratch)


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of the libraries that make the files are not the subject of our tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
