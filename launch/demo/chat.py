"""Greedy chat answers from a transformers model, for conversion checks and training targets."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["greedy_answer", "prompt_ids"]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """Token ids of a one-question conversation, up to where the assistant begins to speak."""
    messages = [{"role": "user", "content": question}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    ids: list[int] = encoded["input_ids"]
    return ids


def greedy_answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    *,
    max_new_tokens: int,
) -> str:
    """The model's most likely answer to `question`, without special tokens."""
    ids = torch.tensor([prompt_ids(tokenizer, question)])  # [1, T]
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    answer: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return answer
