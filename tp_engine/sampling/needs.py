"""What a step's sampled rows need from the vocabulary shards; decided on rank 0 for all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from tp_engine.params import SamplingParams
from tp_engine.steps.plan import SlotInit

__all__ = ["CANDIDATE_SIZES", "sampling_needs", "slot_init"]

CANDIDATE_SIZES = (1, 8, 64, 128)
"""Candidates per shard and row that a step may ask for; few, so that shapes repeat. A larger top-k
needs whole rows."""


def sampling_needs(params: Sequence[SamplingParams]) -> tuple[int, list[int]]:
    """`StepPlan.candidates` and `StepPlan.full_rows` of a step.

    Whether a row is among the full ones depends on its own parameters alone, never on the other
    rows of the step.

    Args:
        params: parameters of the sampled rows, in their order.

    Returns:
        Candidates per shard (one of `CANDIDATE_SIZES`; 0 without rows) and the ascending numbers
        of the rows whose whole logits rank 0 needs.
    """
    full = [row for row, p in enumerate(params) if _needs_full(p)]
    wanted = max((_candidates(p) for p in params), default=0)
    if wanted == 0:
        return 0, []
    return next(size for size in CANDIDATE_SIZES if size >= wanted), full


def _needs_full(params: SamplingParams) -> bool:
    modified = bool(params.penalised or params.logit_bias or params.min_tokens)
    if modified and params.logprobs is not None:
        return True  # reported are the model's own logits, the candidates are of the modified ones
    return not params.greedy and not 1 <= params.top_k <= CANDIDATE_SIZES[-1]


def _candidates(params: SamplingParams) -> int:
    choice = 1 if params.greedy or _needs_full(params) else params.top_k
    return max(choice, params.logprobs or 0)


def slot_init(
    slot: int,
    params: SamplingParams,
    *,
    seed: int,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_ids: Sequence[int],
    prompt_len: int,
) -> SlotInit:
    """What the ranks must know to sample for a request.

    A sampled token's position is its index in the sequence of prompt and output: the first
    generated token has position ``prompt_len``. So tokens at positions below
    ``prompt_len + min_tokens`` are the first ``min_tokens`` generated ones.

    Args:
        slot: the request's slot.
        params: its parameters.
        seed: ``params.seed``, or the one drawn for the request when that is None.
        prompt: the prompt's tokens.
        output: tokens generated before a preemption.
        eos_ids: the model's end-of-sequence tokens.
        prompt_len: tokens of the prompt.
    """
    ends = (*(() if params.ignore_eos else eos_ids), *params.stop_token_ids)
    return SlotInit(
        slot=slot,
        temperature=float(params.temperature),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        top_k=max(params.top_k, 0),
        seed=seed,
        logprobs=-1 if params.logprobs is None else params.logprobs,
        suppress_before=prompt_len + params.min_tokens,
        bias_ids=tuple(params.logit_bias),
        bias_values=tuple(float(bias) for bias in params.logit_bias.values()),
        suppressed=tuple(dict.fromkeys(ends)) if params.min_tokens else (),
        prompt=tuple(prompt) if params.repetition_penalty != 1.0 else (),
        output=tuple(output) if params.penalised else (),
    )
