"""What a request must satisfy before the engine takes it."""

from __future__ import annotations

from dataclasses import dataclass

from tp_engine.memory import PageLayout
from tp_engine.messages import Submit
from tp_engine.params import ParameterError


class RequestError(ValueError):
    """A request that cannot be served; the engine is as before."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineLimits:
    """Sizes that requests are checked against."""

    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    """Of the arena."""
    descriptor_words: int
    """Of the ranks' descriptor tensors."""
    idle_adapter_pages: int
    """Most that adapters which nobody wants may keep."""
    host_pages: int
    """Of every rank's host memory for adapters."""
    adapter_queue: int
    """Most requests that may wait for adapters on their way."""
    prefix_caching: bool
    """Whether computed blocks are kept for later requests."""
    eos_ids: tuple[int, ...]
    kv_dtype: str
    base_digest: str


def longest_context(limits: EngineLimits, layout: PageLayout, adapter_pages: int) -> int:
    """Most tokens of a request whose adapter takes so many pages, prompt and output together."""
    return min(limits.max_model_len, (limits.num_pages - adapter_pages) * layout.block_tokens)


def token_limit(
    message: Submit, limits: EngineLimits, layout: PageLayout, adapter_pages: int
) -> int:
    """Most tokens of this request; without ``max_tokens`` it may fill what there is."""
    most = message.params.max_tokens
    if most is None:
        return longest_context(limits, layout, adapter_pages)
    return len(message.prompt) + most


def check_request(
    message: Submit, limits: EngineLimits, layout: PageLayout, adapter_pages: int
) -> None:
    """Refuse what can never be served, so that whatever is queued will run.

    Args:
        adapter_pages: arena pages of the request's adapter, 0 for the base.

    Raises:
        RequestError: a token id or a length is out of range, or the request and its adapter alone
            are larger than the arena.
    """
    _check_tokens(message, limits.vocab_size)
    length = len(message.prompt)
    # Without max_tokens a prompt may fill the context, or more; one token is to be generated.
    longest = max(token_limit(message, limits, layout, adapter_pages), length + 1)
    if longest > limits.max_model_len:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {length} tokens and {longest - length} more were asked for; "
            f"the context holds {limits.max_model_len}",
            "max_tokens" if length < limits.max_model_len else "prompt",
        )
    pages = layout.blocks(longest)
    if pages + adapter_pages > limits.num_pages:
        raise RequestError(
            "context_length_exceeded",
            f"the request needs {pages} pages for {longest} tokens and {adapter_pages} for its "
            f"adapter; the arena has {limits.num_pages}",
            "max_tokens" if longest > length + 1 else "prompt",
        )


def _check_tokens(message: Submit, vocab_size: int) -> None:
    prompt = message.prompt
    if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
        raise RequestError(
            "invalid_request",
            f"the prompt must be token ids from 0 to {vocab_size - 1}, at least one",
            "prompt",
        )
    try:
        message.params.check_vocabulary(vocab_size)
    except ParameterError as error:
        raise RequestError("invalid_request", str(error), error.param) from error


def check_wait(
    message: Submit, parked: int, limits: EngineLimits, failure: Exception | None
) -> None:
    """Refuse a request for a cold adapter that will not wait, or behind too many that do.

    Args:
        parked: requests that wait.
        failure: why the adapter could not be read, if it was for one that did not wait.

    Raises:
        RequestError: another time it may be served.
    """
    if failure is not None:
        text = f"the adapter of {message.model} cannot be read: {failure}"
        raise RequestError("adapter_unavailable", text)
    if not message.wait_for_adapter:
        text = f"the adapter of {message.model} is being loaded; try again soon"
        raise RequestError("adapter_loading", text)
    if parked >= limits.adapter_queue:
        text = f"{parked} requests wait for adapters that are being loaded; try again soon"
        raise RequestError("overloaded", text)
