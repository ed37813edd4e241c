"""A made-up tokenizer for models that are nothing but shapes."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def write_tokenizer(directory: Path, vocab: int) -> Path:
    """A byte-level tokenizer of ``vocab`` entries: the bytes, then made-up words.

    Every entry beyond the bytes stands for a text of its own, so that a random token costs what a
    token of a real vocabulary costs. Text is encoded byte by byte.

    Raises:
        ValueError: ``vocab`` has no room for the bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab < len(alphabet):
        raise ValueError(f"vocab={vocab} is not allowed: at least {len(alphabet)}")
    words = [f"\u0120w{number:x}" for number in range(vocab - len(alphabet))]
    entries = {entry: index for index, entry in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=entries, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return directory
