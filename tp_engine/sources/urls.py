"""Where adapters may be fetched from: addresses, and the prefixes that an operator allows.

    s3://BUCKET/PATH    https://HOST[:PORT]/PATH    hf://ORG/NAME[@REVISION][/PATH]

A prefix covers an address if scheme and authority are equal and its path's segments begin the
other's: ``s3://b/team`` covers ``s3://b/team/x``, not ``s3://b/team-2``. ``hf://ORG/NAME`` covers
all its revisions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from tp_engine.sources.errors import SourceError

SCHEMES: Final = ("s3", "https", "http", "hf")
MAX_LENGTH: Final = 2048
"""Longest address, in characters."""

_PORTS: Final = {"https": 443, "http": 80}
_HUB_ID: Final = re.compile(r"[A-Za-z0-9_-][\w.-]*/[A-Za-z0-9_-][\w.-]*(@[\w.-]+)?", re.ASCII)
_AUTHORITY: Final = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_SEPARATORS: Final = re.compile(r"[\x00-\x1f\x7f/\\]")
_REFUSED: Final = re.compile(r"[^\x21-\x7e]|[\\<>\"^`{|}]")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceUrl:
    """An address that was checked, in parts."""

    scheme: str
    """One of `SCHEMES`."""
    authority: str
    """Bucket, host with the port if it is not the scheme's own, or organisation."""
    segments: tuple[str, ...]
    """Of the path, decoded, without empty ones, ``.`` and ``..``; a hub's revision left out."""
    revision: str | None = None
    """Of a hub's repository."""
    text: str
    """As it was given, without a slash at the end."""

    def __str__(self) -> str:
        return self.text

    @property
    def site(self) -> str:
        """What is slow or broken together: scheme and authority."""
        return f"{self.scheme}://{self.authority}"

    def covers(self, other: SourceUrl) -> bool:
        """Whether this, taken as a prefix, allows ``other``."""
        return (
            (self.scheme, self.authority) == (other.scheme, other.authority)
            and other.segments[: len(self.segments)] == self.segments
            and self.revision in (None, other.revision)
        )


def parse_url(text: str) -> SourceUrl:
    """Check an address of an adapter, or a prefix of such.

    Raises:
        SourceError: ``source_refused``: another scheme, a user or password, a query or fragment,
            a path with ``..``, empty segments or encoded separators, or characters that URLs
            cannot have.
    """
    parts = _split(text)
    if parts.query or parts.fragment or text[-1] in "?#":
        raise _refused(text, "a query or fragment is not allowed")
    return _checked(text, parts)


def parse_target(text: str) -> SourceUrl:
    """Check the target of a redirect: as `parse_url`, but it may have a query or a fragment."""
    parts = _split(text)
    return _checked(text.partition("?")[0].partition("#")[0], parts)


class AllowedSources:
    """The operator's list; nothing outside it is ever asked for."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        """Allow what any of the prefixes covers.

        Raises:
            SourceError: a prefix is no address.
        """
        self.prefixes = tuple(parse_url(prefix) for prefix in prefixes)

    def find(self, text: str) -> SourceUrl | None:
        """The remote address that an operator means by ``text``; None: a path on this host.

        ``ORG/NAME`` is a hub's repository where the list covers it, whatever lies on the disk.

        Raises:
            SourceError: ``source_refused`` if it is an address that the list does not cover.
        """
        if "://" in text:
            url = parse_url(text)
            if url.scheme == "hf" and not url.segments:
                raise _refused(text, "it names no repository: hf://ORG/NAME")
            if not self.cover(url):
                listed = ", ".join(map(str, self.prefixes)) or "none"
                raise _refused(text, f"it is not below an --adapter-source; there are: {listed}")
            return url
        if _HUB_ID.fullmatch(text):
            url = parse_url(f"hf://{text}")
            return url if self.cover(url) else None
        return None

    def cover(self, url: SourceUrl) -> bool:
        """Whether a prefix covers an address."""
        return any(prefix.covers(url) for prefix in self.prefixes)


def _split(text: str) -> SplitResult:
    if len(text) > MAX_LENGTH:
        raise _refused(text, f"{len(text)} characters; at most {MAX_LENGTH} are allowed")
    if not text or _REFUSED.search(text):
        raise _refused(text, "it is empty or has characters that a URL cannot have")
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018  (raises on a port that is none)
    except ValueError as error:
        raise _refused(text, str(error)) from None
    if parts.scheme not in SCHEMES or "://" not in text:
        raise _refused(text, f"its scheme must be one of {', '.join(SCHEMES)}")
    return parts


def _checked(text: str, parts: SplitResult) -> SourceUrl:
    path = parts.path.removeprefix("/").removesuffix("/")
    segments = tuple(map(unquote, path.split("/"))) if path else ()
    if any(part in ("", ".", "..") or _SEPARATORS.search(part) for part in segments):
        raise _refused(text, "its path has an empty segment, '.', '..' or an encoded separator")
    revision = None
    if parts.scheme == "hf" and segments and "@" in segments[0]:
        name, _, revision = segments[0].partition("@")
        segments = (name, *segments[1:])
        if not name or not re.fullmatch(r"[\w.-]+", revision, re.ASCII):
            raise _refused(text, f"revision {revision!r} must be of letters, digits, '_.-'")
    return SourceUrl(
        scheme=parts.scheme,
        authority=_authority(text, parts),
        segments=segments,
        revision=revision,
        text=text.removesuffix("/"),
    )


def _authority(text: str, parts: SplitResult) -> str:
    if "@" in parts.netloc:
        raise _refused(text.rpartition("@")[2], "a user or password is not allowed in it")
    if parts.scheme not in _PORTS:
        if not _AUTHORITY.fullmatch(parts.netloc):
            raise _refused(text, "it names no bucket or organisation")
        return parts.netloc
    port = parts.port
    host = parts.netloc if port is None else parts.netloc.rpartition(":")[0]
    if not _AUTHORITY.fullmatch(host):
        raise _refused(text, "it names no host")
    own = port in (None, _PORTS[parts.scheme])
    return host.lower() if own else f"{host.lower()}:{port}"


def _refused(text: str, reason: str) -> SourceError:
    shown = text if len(text) <= 200 else text[:197] + "..."
    return SourceError("source_refused", f"adapter source {shown!a} is refused: {reason}")
