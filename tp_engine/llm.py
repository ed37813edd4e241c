"""Offline use: the engine in this process, under torchrun or alone.

    llm = LLM("DIR", lora={"pirate": "adapters/pirate"})
    llm.generate(["Hello"], SamplingParams(max_tokens=8), model=["pirate"])

Under torchrun every rank runs the same script: rank 0 gets results, the others serve it inside
``generate`` and get None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tp_engine.admission import RequestError
from tp_engine.config import EngineConfig
from tp_engine.engine import Engine
from tp_engine.join import join
from tp_engine.messages import Failed, Output, Submit, TokenLogprobs
from tp_engine.params import SamplingParams
from tp_engine.plan import PlanKind
from tp_engine.rank import Rank, build_engine, build_rank, hand_out_adapters, read_adapters
from tp_engine.text import OutputText, Tokenizer

Prompt = str | Sequence[int]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The answer to one prompt."""

    model: str
    prompt_tokens: list[int]
    tokens: list[int]
    """Without the end-of-sequence or stop token."""
    text: str
    finish_reason: str
    """``stop`` or ``length``."""
    logprobs: list[TokenLogprobs] | None
    cached_tokens: int
    """Prompt tokens taken from the prefix cache."""


class LLM:
    """A base model and its adapters, ready to generate."""

    def __init__(
        self, model: str, *, lora: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        """Load the model; every rank must do it with the same arguments.

        Args:
            model: a local directory or a hub id.
            lora: adapter directories by name.
            options: fields of `EngineConfig`.

        Raises:
            ValueError: an option, the checkpoint or an adapter cannot be used.
        """
        joined = join(EngineConfig(model=model, lora=tuple((lora or {}).items()), **options))
        self.rank: Rank = build_rank(joined)
        self.engine: Engine | None = None
        if joined.comm.rank == 0:
            self._tokenizer = load_tokenizer(joined.directory)
            self.registry = read_adapters(joined)
            joined.comm.gather_numbers([1])
            self.engine = build_engine(self.rank)
            with self._others_follow():
                hand_out_adapters(self.rank, self.engine, self.registry)
        else:
            joined.comm.gather_numbers([1])
            self._follow()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        model: str | Sequence[str | None] | None = None,
    ) -> list[Completion] | None:
        """Generate one completion a prompt, all in one batch.

        Args:
            prompts: text or token ids; one or several.
            params: for all prompts, or one each; greedy with 16 tokens without.
            model: adapter or base name for all prompts, or one each; None is the base.

        Returns:
            On rank 0 the completions in the order of the prompts; None elsewhere.

        Raises:
            RequestError, UnknownModel: a prompt cannot be served; none was.
        """
        if self.engine is None:
            return self._follow()
        items = _as_list(prompts)
        with self._others_follow():
            requests = self._submit(
                [self._text().encode(p) if isinstance(p, str) else list(p) for p in items],
                _spread(params or SamplingParams(temperature=0.0), len(items), "params"),
                _spread(model, len(items), "model"),
            )
            return self._run(requests)

    def chat(
        self,
        conversations: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        model: str | Sequence[str | None] | None = None,
    ) -> list[Completion] | None:
        """As `generate`, from messages with ``role`` and ``content`` through the chat template."""
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        chats: Sequence[Any] = [conversations] if single else conversations
        prompts = [self._text().encode_chat(chat) for chat in chats]
        return self.generate(prompts, params, model=model)

    def close(self) -> None:
        """Let the other ranks leave; nothing can be generated afterwards."""
        if self.engine is not None:
            self.engine.control(PlanKind.STOP)
        else:
            self._follow()

    def _follow(self) -> None:
        self.rank.worker.follow(lambda: None)

    @contextmanager
    def _others_follow(self) -> Iterator[None]:
        """The other ranks carry out plans for as long as this lasts."""
        assert self.engine is not None
        try:
            yield
        finally:
            self.engine.control(PlanKind.RETURN)

    def _text(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError("the model's directory has no tokenizer: give prompts as token ids")
        return self._tokenizer

    def _submit(
        self,
        prompts: list[list[int]],
        params: Sequence[SamplingParams],
        models: Sequence[str | None],
    ) -> list[_Open]:
        """Queue all prompts, or none and raise."""
        assert self.engine is not None
        opened: list[_Open] = []
        try:
            for i, (prompt, param, model) in enumerate(zip(prompts, params, models, strict=True)):
                resolved = self.registry.resolve(model or self.rank.config.base_names[0])
                message = Submit(
                    request_id=str(i), model=resolved.name, prompt=prompt, params=param
                )
                self.engine.submit(message, resolved.digest)
                opened.append(_Open(message, self._tokenizer))
        except ValueError:
            for item in opened:
                self.engine.abort(item.message.request_id)
            raise
        return opened

    def _run(self, requests: list[_Open]) -> list[Completion]:
        assert self.engine is not None
        by_id = {item.message.request_id: item for item in requests}
        while self.engine.requests:
            for output in self.engine.step():
                if isinstance(output, Failed):
                    raise RequestError(output.code, output.message, output.param)
                if by_id[output.request_id].take(output):
                    self.engine.abort(output.request_id, finished=True)
        return [item.completion() for item in requests]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Open:
    """One prompt of a `generate` call while it runs."""

    def __init__(self, message: Submit, tokenizer: Tokenizer | None) -> None:
        self.message = message
        params = message.params
        if params.stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the model's directory has none")
        self._text = tokenizer and OutputText(
            tokenizer, stops=params.stop, min_tokens=params.min_tokens
        )
        self._parts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._reason = ""
        self._cached = 0

    def take(self, output: Output) -> bool:
        """Add what a step gave; True when a stop string ends the output here."""
        self._tokens += output.tokens
        self._logprobs += output.logprobs or []
        self._reason = output.finish_reason or ""
        self._cached = output.cached_tokens
        if self._text is not None:
            self._parts.append(self._text.push(output.tokens).text)
            if self._text.stopped_by is not None:
                self._reason = "stop"
                return True
            if self._reason:
                self._parts.append(self._text.flush().text)
        return False

    def completion(self) -> Completion:
        """The whole, once it has ended."""
        return Completion(
            model=self.message.model,
            prompt_tokens=self.message.prompt,
            tokens=self._tokens,
            text="".join(self._parts),
            finish_reason=self._reason,
            logprobs=self._logprobs if self.message.params.logprobs is not None else None,
            cached_tokens=self._cached,
        )


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The directory's tokenizer; None when it has no tokenizer files."""
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    return Tokenizer.load(directory)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # text or ids: one prompt
    return list(prompts)  # type: ignore[arg-type]


def _spread(value: T | Sequence[T], count: int, name: str) -> list[T]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * count  # type: ignore[list-item]  # one for all
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries; one for each of {count} prompts")
    return list(value)
