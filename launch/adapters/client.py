"""The control plane over HTTP."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import httpx

from launch.adapters.arguments import Settings, UsageError
from tp_engine.sources import CONFIG_NAME, WEIGHTS_NAME

Answer = dict[str, Any]
PAGE: Final = 500
TIMEOUT: Final = httpx.Timeout(600.0, connect=10.0)
"""Seconds; some calls are answered when the engine has done what was asked."""


class Refused(Exception):
    """What the server answers instead of doing it; the message is the server's."""

    def __init__(self, status: int, error: Answer) -> None:
        code = error.get("code")
        super().__init__(f"{error.get('message')}" + (f" ({code})" if code else ""))
        self.status = status
        self.code = code


class ControlPlane:
    """One server. Use as a context manager."""

    def __init__(self, settings: Settings) -> None:
        """Prepare to ask a server.

        Raises:
            UsageError: its address is no URL.
        """
        headers = {} if settings.key is None else {"authorization": f"Bearer {settings.key}"}
        if not settings.url.startswith(("http://", "https://")):
            raise UsageError(f"--url {settings.url!r} must begin with http:// or https://")
        base = settings.url.rstrip("/").removesuffix("/v1")
        try:
            self._http = httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT)
        except httpx.InvalidURL as error:
            raise UsageError(
                f"--url {settings.url!r} is no address of a server: {error}"
            ) from error
        self._settings = settings

    def __enter__(self) -> ControlPlane:
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.close()

    def ask(self, method: str, path: str, **options: Any) -> Answer:
        """One call below ``/admin``.

        Raises:
            Refused: the server says no.
            httpx.HTTPError: there is no server, or it broke off.
        """
        answer = self._http.request(method, f"/admin{path}", **options)
        try:
            body = answer.json()
        except ValueError:
            body = None
        if answer.status_code >= 400 or not isinstance(body, dict):
            raise Refused(answer.status_code, self._error(answer, body))
        return body

    def _error(self, answer: httpx.Response, body: Any) -> Answer:
        status = answer.status_code
        error = body.get("error") if isinstance(body, dict) else None
        if not isinstance(error, dict):
            text = f"{self._settings.url} answers {status} {answer.reason_phrase}"
            return {"message": f"{text}, which is no answer of tp-engine"}
        if status == 401:
            text = f"{error.get('message')}; the key is {self._settings.origin}"
            return {**error, "message": text}
        if status == 404 and error.get("code") == "not_found":
            text = f"{error.get('message')}; without --admin-key-file there is no control plane"
            return {"message": text}
        return error

    def adapter(self, name: str, action: str = "") -> str:
        """The path of an adapter, or of something done to it."""
        return f"/adapters/{quote(name, safe='/')}" + (f"/{action}" if action else "")

    def operation(self, number: str, action: str = "") -> str:
        """The path of an operation, or of something done to it."""
        return f"/operations/{quote(number, safe='')}" + (f"/{action}" if action else "")

    def pages(self, kind: str, key: str, limit: int | None, **query: str) -> Iterator[Answer]:
        """The entries of a list, over all its pages; ``key`` names an entry."""
        after, left = "", limit
        while left is None or left > 0:
            size = PAGE if left is None else min(PAGE, left)
            asked = {**query, "after": after, "limit": str(size)}
            entries = self.ask("GET", f"/{kind}", params=asked)[kind]
            yield from entries
            if len(entries) < size:
                return
            after, left = entries[-1][key], None if left is None else left - size

    def send(
        self, path: str, directory: Path, progress: Callable[[int], None], **query: str
    ) -> Answer:
        """Send an adapter's two files; ``progress`` is told how many bytes have gone out in all.

        Raises:
            UsageError: it is no directory, or a file is missing.
        """
        if not directory.is_dir():
            raise UsageError(f"{directory} is no directory")
        with ExitStack() as stack:
            files = {}
            told = _Told(progress)
            for number, name in enumerate((CONFIG_NAME, WEIGHTS_NAME)):
                if not (directory / name).is_file():
                    raise UsageError(
                        f"{directory} has no {name}: {CONFIG_NAME} and {WEIGHTS_NAME} are needed"
                    )
                opened = stack.enter_context(_Counted(directory / name, told))
                files[f"file{number}"] = (name, opened)
            return self.ask("POST", path, files=files, params=query)


class _Told:
    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress = progress
        self._sent = 0

    def add(self, count: int) -> None:
        self._sent += count
        self._progress(self._sent)


class _Counted(io.FileIO):
    """A file that tells how much of it is read."""

    def __init__(self, path: Path, told: _Told) -> None:
        super().__init__(path)
        self._told = told

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size)
        self._told.add(len(data))
        return data
