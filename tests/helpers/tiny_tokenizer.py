"""A small byte-level tokenizer with a chat template, for tests that need text."""

import warnings
from pathlib import Path

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
"""Ids 0 to 5; 1 begins a text and 2 ends one, as in the tiny models' configs."""
VOCABULARY = 320
"""Special tokens, all bytes, and merges."""

CORPUS = (
    "the quick brown fox jumps over the lazy dog and the dog then sleeps in the sun",
    "there is nothing to be seen here, neither this nor that, other than the thing itself",
    "what is the capital of France? The capital of France is Paris.",
)

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def save_tokenizer(path: Path) -> None:
    """Write a byte-level BPE tokenizer of `VOCABULARY` tokens and its chat template to `path`.

    Any text comes back unchanged from encoding and decoding; nothing is added in front of it.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=1,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)
