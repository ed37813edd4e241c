"""Adapters behind HTTP: ``URL/adapter_config.json`` and its neighbours.

fsspec's own HTTP follows redirects wherever they lead and does not tie a range to the content
that the one before was of; here both are checked, so httpx is used directly.

Format: RFC 9110 (validators: 8.8, ranges: 14, If-Range: 13.1.5).
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Final
from urllib.parse import quote

import httpx

from tp_engine.sources.errors import SourceBroken, SourceChanged, SourceError
from tp_engine.sources.source import RemoteFile
from tp_engine.sources.urls import AllowedSources, SourceUrl, parse_target

TIMEOUT: Final = httpx.Timeout(30.0, connect=10.0)
"""Seconds for a connection, and for each read."""
MAX_REDIRECTS: Final = 5

_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class HttpSource:
    """See `tp_engine.sources.source.Source`."""

    def __init__(self, url: SourceUrl, allowed: AllowedSources) -> None:
        """Prepare; redirects are followed within ``allowed``."""
        self._url = url
        self._allowed = allowed
        # Encoded content has no ranges that can be put together.
        headers = {"accept-encoding": "identity"}
        self._client = httpx.Client(
            timeout=TIMEOUT, headers=headers, verify=_trusted(), follow_redirects=False
        )

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def stat(self, name: str) -> RemoteFile:
        """Describe a file from the headers of its response."""
        with self._open("HEAD", name, {}) as answer:
            if answer.status_code not in (405, 501) and "content-length" in answer.headers:
                return self._described(name, answer)
        with self._open("GET", name, {}) as answer:
            return self._described(name, answer)

    @contextmanager
    def blocks(self, file: RemoteFile, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """The content from ``offset`` if the server has ranges and the file has a tag."""
        headers = {}
        if offset and file.tag is not None:
            headers = {"range": f"bytes={offset}-", "if-range": file.tag}
        with self._open("GET", file.name, headers) as answer:
            if answer.status_code == 206:
                self._check_range(file, offset, answer)
            else:
                offset = 0
                found = self._described(file.name, answer)
                if (found.size, found.tag) != (file.size, file.tag):
                    raise SourceChanged(f"{self._address(file.name)} has changed")
            yield offset, _read(answer)

    # -----------------------------------------------------------------------------------------

    def _address(self, name: str) -> str:
        return f"{self._url}/{quote(name)}"

    @contextmanager
    def _open(self, method: str, name: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """A response that is no redirect and no error, its body unread."""
        address = self._address(name)
        try:
            for _ in range(MAX_REDIRECTS + 1):
                with self._client.stream(method, address, headers=headers) as answer:
                    if not answer.has_redirect_location:
                        _check_status(method, self._address(name), answer)
                        yield answer
                        return
                    address = self._redirected(name, answer)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise SourceError("source_failed", f"{self._address(name)}: {error}") from error
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise SourceBroken(f"{self._address(name)}: {reason}") from error
        reason = f"redirects more than {MAX_REDIRECTS} times"
        raise SourceError("source_failed", f"{self._address(name)} {reason}")

    def _redirected(self, name: str, answer: httpx.Response) -> str:
        """Where a response leads.

        Raises:
            SourceError: ``source_refused`` if that is outside the allowed prefixes.
        """
        target = str(answer.url.join(answer.headers["location"]))
        shown = target.partition("?")[0]  # a query may hold a signature
        try:
            covered = self._allowed.cover(parse_target(target))
        except SourceError:
            covered = False
        if not covered:
            reason = f"redirects to {shown[:200]!a}, which is not below an --adapter-source"
            raise SourceError("source_refused", f"{self._address(name)} {reason}")
        return target

    def _described(self, name: str, answer: httpx.Response) -> RemoteFile:
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise SourceError("source_failed", f"{self._address(name)} comes encoded only")
        length = answer.headers.get("content-length", "")
        if not length.isdecimal():
            raise SourceError("source_failed", f"{self._address(name)} does not tell its length")
        return RemoteFile(name=name, size=int(length), tag=_tag(answer))

    def _check_range(self, file: RemoteFile, offset: int, answer: httpx.Response) -> None:
        found = _RANGE.fullmatch(answer.headers.get("content-range", ""))
        wanted = (offset, file.size - 1, file.size)
        if found is None or tuple(map(int, found.groups())) != wanted:
            raise SourceChanged(f"{self._address(file.name)} gives another range than asked for")
        if (tag := _tag(answer)) not in (None, file.tag):
            raise SourceChanged(f"{self._address(file.name)} is {tag}, was {file.tag}")


@cache
def _trusted() -> ssl.SSLContext:
    """The usual certificates; reading them takes a while."""
    return httpx.create_ssl_context()


def _tag(answer: httpx.Response) -> str | None:
    """The strongest validator there is that ``If-Range`` takes."""
    tag = answer.headers.get("etag")
    if tag is not None and not tag.startswith("W/"):
        return str(tag)
    modified = answer.headers.get("last-modified")
    return None if modified is None else str(modified)


def _read(answer: httpx.Response) -> Iterator[bytes]:
    yield from answer.iter_raw()


def _check_status(method: str, address: str, answer: httpx.Response) -> None:
    status = answer.status_code
    if status in (200, 206) or (method == "HEAD" and status in (405, 501)):
        return
    text = f"{address} answers {status} {answer.reason_phrase}"
    if status in (404, 410):
        raise SourceError("source_missing", text)
    if status in (401, 403):
        raise SourceError("source_denied", text)
    if status in (408, 425, 429) or status >= 500:
        raise SourceBroken(text)
    raise SourceError("source_failed", text)
