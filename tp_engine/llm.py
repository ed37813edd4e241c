"""Offline use: the engine in this process, under torchrun or alone.

    llm = LLM("DIR", lora={"pirate": "adapters/pirate"})
    llm.generate(["Hello"], SamplingParams(max_tokens=8), model=["pirate"])

Under torchrun every rank runs the same script: rank 0 gets results, the others serve it inside
``generate`` and get None.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tp_engine.config import EngineConfig
from tp_engine.engine import Engine
from tp_engine.fleet import AdapterLoader, StartingAdapters
from tp_engine.messages import Failed, Submit
from tp_engine.params import SamplingParams
from tp_engine.rank import Rank, build_engine, build_rank, read_adapters
from tp_engine.ranks.join import join
from tp_engine.requests.admission import RequestError
from tp_engine.requests.completion import Completion, OpenPrompt
from tp_engine.steps.plan import PlanKind
from tp_engine.text import Tokenizer

Prompt = str | Sequence[int]
T = TypeVar("T")


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
        # All that wait for an adapter are of one call: to refuse one would refuse the call.
        options = {"adapter_queue": sys.maxsize} | options
        joined = join(EngineConfig(model=model, lora=tuple((lora or {}).items()), **options))
        self.rank: Rank = build_rank(joined)
        self.engine: Engine | None = None
        if joined.comm.rank == 0:
            self._tokenizer = load_tokenizer(joined.directory)
            loader = AdapterLoader(self.rank, None)
            starting = StartingAdapters(loader, self.rank.worker.host.memory.shape[0])
            self.registry = read_adapters(joined, starting.take)
            joined.comm.gather_numbers([1])
            self.engine = build_engine(self.rank, loader.fetch)
            with self._others_follow():
                starting.hand_out(self.engine, self.registry, joined.config.lora_on_error)
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

        def encoded() -> list[list[int]]:
            items = _as_list(prompts)
            return [self._text().encode(p) if isinstance(p, str) else list(p) for p in items]

        return self._complete(encoded, params, model, continues=True)

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
        return self._complete(
            lambda: [self._text().encode_chat(chat) for chat in chats],
            params,
            model,
            continues=False,
        )

    def close(self) -> None:
        """Let the other ranks leave; nothing can be generated afterwards."""
        if self.engine is not None:
            self.engine.control(PlanKind.STOP)
        else:
            self._follow()

    def _complete(
        self,
        encoded: Callable[[], list[list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        model: str | Sequence[str | None] | None,
        *,
        continues: bool,
    ) -> list[Completion] | None:
        """The completions of what ``encoded`` gives on rank 0, which alone has a tokenizer."""
        if self.engine is None:
            self._follow()
            return None
        with self._others_follow():
            prompts = encoded()
            requests = self._submit(
                prompts,
                _spread(params or SamplingParams(temperature=0.0), len(prompts), "params"),
                _spread(model, len(prompts), "model"),
                continues=continues,
            )
            return self._run(requests)

    def _follow(self) -> None:
        self.rank.worker.follow(lambda: None)

    @contextmanager
    def _others_follow(self) -> Iterator[None]:
        """The other ranks carry out plans for as long as this lasts; nothing stays open."""
        assert self.engine is not None
        try:
            yield
        finally:
            for request_id in list(self.engine.requests):
                self.engine.abort(request_id)
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
        *,
        continues: bool,
    ) -> list[OpenPrompt]:
        assert self.engine is not None
        opened: list[OpenPrompt] = []
        for i, (prompt, param, model) in enumerate(zip(prompts, params, models, strict=True)):
            resolved = self.registry.resolve(model or self.rank.config.base_names[0])
            message = Submit(request_id=str(i), model=resolved.name, prompt=prompt, params=param)
            opened.append(OpenPrompt(message, self._tokenizer, continues=continues))
            self.engine.submit(message, resolved.digest)
        return opened

    def _run(self, requests: list[OpenPrompt]) -> list[Completion]:
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
        # After a lost rank no word would arrive any more; a follower's error is such a loss.
        lost = isinstance(error, RuntimeError) or (error is not None and self.engine is None)
        if not lost:
            self.close()


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
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries; one for each of {count} prompts")
    return list(value)
