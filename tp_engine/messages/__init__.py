"""Typed messages between the HTTP front end and the engine on rank 0.

Both directions are msgpack of lists of one tagged union each, over a local ZeroMQ socket pair: what
a step gave is one list, and so are the outputs that one HTTP request asks for, which the engine
takes in one turn. The front end holds the tokenizer: the engine sees token ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tp_engine.messages.adapters import (
    AdapterAnswer,
    AdapterCall,
    AdapterList,
    AdapterReply,
    AdaptersFlushed,
    AdapterState,
    AdapterStatus,
    DrainAdapter,
    FlushAdapters,
    ListAdapters,
    LoadAdapter,
    MoveAdapter,
    NameCall,
    PinAdapter,
    PreloadAdapter,
    PushAdapter,
    ResumeAdapter,
    UnloadAdapter,
)
from tp_engine.messages.base import Message
from tp_engine.params import SamplingParams

__all__ = [
    "Abort",
    "AdapterAnswer",
    "AdapterCall",
    "AdapterList",
    "AdapterReply",
    "AdapterState",
    "AdapterStatus",
    "AdaptersFlushed",
    "Admitted",
    "DrainAdapter",
    "Draining",
    "Failed",
    "FlushAdapters",
    "Goodbye",
    "ListAdapters",
    "LoadAdapter",
    "Message",
    "ModelCard",
    "Models",
    "MoveAdapter",
    "NameCall",
    "Output",
    "Phase",
    "PinAdapter",
    "PreloadAdapter",
    "PushAdapter",
    "Ready",
    "ResumeAdapter",
    "Stats",
    "Submit",
    "ToEngine",
    "ToFrontEnd",
    "TokenLogprobs",
    "UnloadAdapter",
    "decode_to_engine",
    "decode_to_front_end",
    "encode_all",
]


# --- front end to engine ---------------------------------------------------------------------


class Submit(Message, frozen=True, kw_only=True):
    """Start a request.

    Answered by `Admitted` and `Output`, the last with a ``finish_reason``, or by `Failed`.
    """

    request_id: str
    """Unique among open requests."""
    model: str
    """A served base name or a registered adapter name; resolved once, at admission."""
    prompt: list[int]
    """Token ids, at least one."""
    params: SamplingParams
    salt: str = ""
    """Prefix blocks are shared only between requests of equal salt (tenant isolation)."""
    wait_for_adapter: bool = True
    """Whether it waits for an adapter that has to be read first; else it is refused then."""


class Abort(Message, frozen=True, kw_only=True):
    """Stop a request and free what it holds; no more `Output` follows. Unknown ids are ignored."""

    request_id: str
    finished: bool = False
    """True when the front end ended it itself (a stop string), so that it counts as a success."""


class Goodbye(Message, frozen=True, kw_only=True):
    """The front end has nothing open and leaves; the engine may end."""


ToEngine = Submit | Abort | Goodbye | AdapterCall


# --- engine to front end ---------------------------------------------------------------------


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of ``/v1/models``."""

    name: str
    root: str
    """Where the weights came from."""
    parent: str | None = None
    """The base's served name; None for the base itself."""
    revision: str | None = None
    """SHA-256 of the adapter's canonical config and tensors, in hex."""
    held: bool = False
    """Whether it takes no new requests."""


class Phase(Message, frozen=True, kw_only=True):
    """Start-up progress for ``/health``."""

    name: str


class Ready(Message, frozen=True, kw_only=True):
    """The engine serves: sent once, after warm-up."""

    models: list[ModelCard]
    max_model_len: int
    vocab_size: int


class Models(Message, frozen=True, kw_only=True):
    """What is served from now on, after adapters came or went."""

    models: list[ModelCard]
    max_model_len: int


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one output position."""

    token: int
    logprob: float
    top_ids: list[int]
    """Best tokens, best first; empty when only the sampled one was asked for."""
    top_logprobs: list[float]


class Admitted(Message, frozen=True, kw_only=True):
    """The request is queued, and keeps the revision that its model meant in this moment."""

    request_id: str
    revision: str
    """SHA-256 of the adapter's canonical config and tensors, or of the base, in hex."""


class Output(Message, frozen=True, kw_only=True):
    """New tokens of one request."""

    request_id: str
    tokens: list[int]
    """Without the end-of-sequence or stop token that ended it."""
    logprobs: list[TokenLogprobs] | None = None
    """One per entry of ``tokens``, when asked for."""
    finish_reason: str | None = None
    """``stop`` or ``length`` in the last message, else None."""
    stop_token: int | None = None
    """The end-of-sequence or stop token that ended it, when that is why."""
    cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache."""
    completion_tokens: int = 0
    """Tokens generated so far, the stop token included."""


class Failed(Message, frozen=True, kw_only=True):
    """The request was refused or lost; nothing more follows."""

    request_id: str
    code: str
    """For programs, such as ``model_not_found``, ``invalid_request`` or ``overloaded``;
    ``engine_dead`` is of all requests."""
    message: str
    param: str | None = None


class Stats(Message, frozen=True, kw_only=True):
    """Counters and gauges for ``/metrics``, sent about once a second and on change of state."""

    gauges: dict[str, float]
    counters: dict[str, float]
    """Monotonic since start."""
    max_adapters: int
    """How many adapters the engine knows."""
    running_adapters: Sequence[str] = ()
    """Names whose revision stands in the arena, ready to be used."""
    waiting_adapters: Sequence[str] = ()
    """Names whose revision queued requests wait for."""


class Draining(Message, frozen=True, kw_only=True):
    """The engine takes no new request and will end when the open ones have."""


ToFrontEnd = Phase | Ready | Models | AdapterAnswer | Admitted | Output | Failed | Stats | Draining

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_to_front_end = msgspec.msgpack.Decoder(list[ToFrontEnd])


def encode_all(messages: Sequence[Message]) -> bytes:
    """Encode messages that travel together, in order."""
    return _encoder.encode(messages)


def decode_to_engine(data: bytes) -> list[ToEngine]:
    """Decode what the front end sent together. Raises as `decode_to_front_end`."""
    return _to_engine.decode(data)


def decode_to_front_end(data: bytes) -> list[ToFrontEnd]:
    """Decode what the engine sent together. Raises ``msgspec.ValidationError`` on anything else."""
    return _to_front_end.decode(data)
