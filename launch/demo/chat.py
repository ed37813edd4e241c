"""Greedy chat answers from a transformers model, for conversion checks and training targets."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["greedy_answers", "prompt_ids"]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Token ids of a one-question conversation, up to where the assistant begins to speak."""
    messages = [{"role": "user", "content": question}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    ids: list[int] = encoded["input_ids"]
    return ids


def greedy_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[str],
    *,
    max_new_tokens: int,
) -> list[str]:
    """The model's most likely answer to each question, without special tokens."""
    prompts = [prompt_ids(tokenizer, question) for question in questions]
    longest = max(len(prompt) for prompt in prompts)
    fill = [longest - len(prompt) for prompt in prompts]
    pad = tokenizer.pad_token_id
    pairs = list(zip(prompts, fill, strict=True))
    with torch.inference_mode():
        output = model.generate(
            input_ids=torch.tensor([[pad] * n + prompt for prompt, n in pairs]),  # [B, T]
            attention_mask=torch.tensor([[0] * n + [1] * len(prompt) for prompt, n in pairs]),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    return [tokenizer.decode(row, skip_special_tokens=True) for row in output[:, longest:]]
