"""Writes the demo model's directories: `python -m launch.demo.convert {gguf,nf4} SOURCE TARGET`.

Run as a child process by `launch.demo.model`.
"""

import argparse
import logging
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from launch.demo.chat import greedy_answers

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris"


def convert_gguf(source: Path, target: Path) -> None:
    """De-quantise the GGUF file `source` and save it as an fp16 Hugging Face directory.

    fp16, because a Q4_1 or Q8_0 value is an fp16 scale times a small integer (plus an fp16
    minimum): rounding to fp16's 11 bits stays an order of magnitude under bf16's 8, at half the
    size of the exact float32.
    """
    location = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**location)
    loaded = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32)
    config = loaded.config
    # The weights are plain tensors by now, yet transformers goes on treating the model as
    # quantised and will not save it: move them to a model that never heard of GGUF.
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    model.load_state_dict(loaded.state_dict())
    _require_finite(model)
    model.save_pretrained(target)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(target)
    _require_answer(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32), tokenizer)


def quantise_nf4(source: Path, target: Path) -> None:
    """Quantise the directory `source` with bitsandbytes and save it to `target`.

    Nested absmax, compute dtype and unquantised tensors float32: what a CPU computes in.
    """
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(
        source, quantization_config=config, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _require_answer(AutoModelForCausalLM.from_pretrained(target, device_map="cpu"), tokenizer)


def _require_finite(model: PreTrainedModel) -> None:
    for name, tensor in model.state_dict().items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name}: not finite after rounding to fp16")


def _require_answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    [answer] = greedy_answers(model, tokenizer, [QUESTION], max_new_tokens=16)
    if not answer.startswith(ANSWER):
        raise ValueError(f"the converted model answers {answer!r}, expected {ANSWER + '...'!r}")


def main() -> None:
    """Parse the command line and write one directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["gguf", "nf4"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    disable_progress_bar()
    # bitsandbytes looks for the distribution `kernels`, finds this checkout's package of the same
    # name, and warns that an optional fast path is missing.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    write = convert_gguf if arguments.kind == "gguf" else quantise_nf4
    write(arguments.source, arguments.target)


if __name__ == "__main__":
    main()
