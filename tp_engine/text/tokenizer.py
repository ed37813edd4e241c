"""The tokenizer of one model directory, safe to use from several threads.

Needs no torch: transformers imports it when it can find it, which costs seconds; a process that
hides it (see ``server.main``) loads a tokenizer in about one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tp_engine.text.token_bytes import token_bytes


class TokenizerError(ValueError):
    """A model directory has no tokenizer that can be used; the message says which and why."""


class ChatTemplateError(ValueError):
    """There is no chat template, or it refuses the messages; carries the template's message.

    ``param`` is the request field at fault.
    """

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class Tokenizer:
    """Text to ids and back, and chat messages to ids."""

    def __init__(self, inner: Any) -> None:
        """Wrap a transformers tokenizer that has a Rust ``backend_tokenizer``."""
        self._inner = inner
        self._backend = inner.backend_tokenizer
        # A tokenizer.json saved with these set would cut or pad every prompt.
        self._backend.no_truncation()
        self._backend.no_padding()
        decoder = self._backend.decoder
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        added = inner.added_tokens_decoder.items()
        self._added = {token: entry.content for token, entry in added}
        self.special_ids = frozenset(token for token, entry in added if entry.special)
        self.longest = max(map(len, self._backend.get_vocab()))
        """Characters of the longest entry: a token stands for at most so many."""
        self._library_options = _parameters(inner.apply_chat_template) | {"messages"}

    @classmethod
    def load(cls, directory: Path, *, chat_template: str | None = None) -> Tokenizer:
        """Read the tokenizer files of ``directory``; nothing is fetched and no code is run.

        Args:
            directory: a local Hugging Face model directory.
            chat_template: a Jinja template that replaces the directory's own.

        Raises:
            TokenizerError: files are missing or corrupt, or the tokenizer has no Rust form.
        """
        from transformers import AutoTokenizer

        if not directory.is_dir():
            raise TokenizerError(f"tokenizer={str(directory)!r} is not a directory")
        try:
            inner = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # the library documents no set of errors for corrupt files
            raise TokenizerError(f"{directory}: cannot load the tokenizer: {error}") from error
        if getattr(inner, "backend_tokenizer", None) is None or len(inner) == 0:
            raise TokenizerError(
                f"{directory}: {type(inner).__name__} has no usable Rust tokenizer; "
                "the directory needs a tokenizer.json"
            )
        if chat_template is not None:
            inner.chat_template = chat_template
        return cls(inner)

    def __len__(self) -> int:
        """Entries of the vocabulary, added tokens included."""
        return len(self._inner)

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work at all."""
        return self._inner.chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``; special tokens spelt out in it are recognised as such."""
        # Of the entry points only those of batches release the GIL; without offsets it takes half
        # the time.
        batch = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = batch[0].ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids outside the vocabulary yield nothing."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of ``messages`` as the chat template lays them out.

        Args:
            messages: mappings with at least ``role`` and ``content``.
            add_generation_prompt: end with the header of an assistant turn.
            continue_final_message: leave the last message open instead.
            add_special_tokens: put the tokenizer's own around what the template wrote.
            template_arguments: further variables for the template.

        Raises:
            ChatTemplateError: no template, or an error in it or raised by it.
        """
        if not self.has_chat_template:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        extra = dict(template_arguments or {})
        if reserved := sorted(self._library_options & extra.keys()):
            text = f"chat_template_kwargs may not set {', '.join(reserved)}"
            raise ChatTemplateError(text, param="chat_template_kwargs")
        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **extra,
            )
        except Exception as error:  # templates are foreign code: they can raise anything
            raise ChatTemplateError(f"chat template: {error}") from error
        return self.encode(text, add_special_tokens=add_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """Bytes that the id stands for, alone; empty for an id outside the vocabulary."""
        if (added := self._added.get(token)) is not None:
            return str(added).encode()
        entry = self._backend.id_to_token(token)
        return b"" if entry is None else token_bytes(entry, byte_level=self._byte_level)


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Names of its parameters, without those that it takes for whatever else it is given."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)
