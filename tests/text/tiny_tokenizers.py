"""Two little tokenizers, of the two kinds that served models have."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{{ '<|user|>' if message.role == 'user' else '<|assistant|>' }}{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_PAIRS = ("th", "he", "in", "er", "\u0120t", "\u0120w", "\u00f0\u0141", "\u0120\u00e2")
"""Merges, among them some that join a space or two bytes with half a character."""


def byte_level(directory: Path, *, template: str | None = TEMPLATE) -> Path:
    """A byte-level BPE tokenizer (as Llama 3, Qwen, SmolLM have) with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, *_PAIRS])}
    merges = [(pair[0], pair[1]) for pair in _PAIRS]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return _save(tokenizer, directory, template)


def byte_fallback(directory: Path) -> Path:
    """A sentencepiece-like tokenizer (as Llama 2 and Mistral have) without a chat template."""
    pieces = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), "\u2581"]
    pieces += [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces += ["\u2581h", "\u2581w", "he"]
    vocab = {token: index for index, token in enumerate(pieces)}
    merges = [("\u2581", "h"), ("\u2581", "w"), ("h", "e")]
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _save(tokenizer, directory, None)


def _save(tokenizer: Tokenizer, directory: Path, template: str | None) -> Path:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return directory
