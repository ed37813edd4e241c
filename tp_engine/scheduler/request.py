"""One request inside the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tp_engine.memory import AdapterFootprint, Resident, block_key
from tp_engine.params import SamplingParams


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What was asked for, how far it is, and what it holds.

    ``tokens[:computed]`` have their keys and values in ``pages`` (or will have when the step that
    was planned last is done); the rest is still to be computed. A preempted request gives up slot,
    pages and adapter and computes again from its tokens.
    """

    id: str
    number: int
    """Counts requests in the order of their arrival."""
    prompt_len: int
    params: SamplingParams
    seed: int
    limit: int
    """Most tokens, prompt and output together."""
    model: str
    """The name it asked for."""
    root: bytes
    """Prefix key before its first block: base, revision, tenant salt, KV dtype."""
    adapter: AdapterFootprint | None
    tokens: list[int]
    """Prompt and confirmed output."""

    pending: int = 0
    """Tokens that steps under way will sample; their ids are known when they have ended."""
    ended: bool = False
    """Finished or aborted; steps under way may still hold rows of it."""
    computed: int = 0
    slot: int | None = None
    slot_is_new: bool = False
    """The ranks have not been told of the slot yet."""
    slot_has_last: bool = False
    """The slot's last sampled token is ``tokens[-1]``."""
    resident: Resident | None = None
    pages: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    pages_told: int = 0
    """How many of ``pages`` the ranks' page tables know."""
    keys: list[bytes] = field(default_factory=list)
    """Prefix keys of its full blocks, as far as computed."""
    published: int = 0
    """How many of its blocks were offered to the prefix cache."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache gave at first admission."""
    admitted: bool = False

    @property
    def output_len(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    def ends_with(self, token: int, eos_ids: Sequence[int]) -> bool:
        """Whether its output ends with this token, which has just been added."""
        params = self.params
        if self.output_len <= params.min_tokens and params.min_tokens > 0:
            return False
        return token in params.stop_token_ids or (not params.ignore_eos and token in eos_ids)

    @property
    def remaining(self) -> int:
        """Rows still to be computed, pending tokens counted in; 1 while decoding. The last token
        that it may have is never computed."""
        return min(len(self.tokens) + self.pending, self.limit - 1) - self.computed

    def block_keys(self, blocks: int, block_tokens: int) -> Sequence[bytes]:
        """Keys of the first ``blocks`` blocks, all of which must be full of known tokens."""
        while len(self.keys) < blocks:
            start = len(self.keys) * block_tokens
            parent = self.keys[-1] if self.keys else self.root
            self.keys.append(block_key(parent, self.tokens[start : start + block_tokens]))
        return self.keys[:blocks]


@dataclass(frozen=True, slots=True)
class Work:
    """A request's part of one step: its next ``rows`` tokens."""

    request: Request
    start: int
    """Position of the first row."""
    rows: int
    samples: bool
    """Whether its last row yields a new token."""
