"""Adapters on the Hugging Face Hub: ``hf://ORG/NAME[@REVISION][/PATH]``, through fsspec.

A revision is resolved to its commit once, so all that is read is of one commit. ``HF_TOKEN``,
``HF_ENDPOINT`` and ``HF_HUB_OFFLINE`` mean what they mean to the Hub's own tools. The Hub serves
large files from addresses of its own choice: who allows a repository allows those.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from huggingface_hub import HfApi, HfFileSystem, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from tp_engine.sources.errors import SourceBroken, SourceError
from tp_engine.sources.files import BLOCK_BYTES, read_blocks
from tp_engine.sources.source import RemoteFile
from tp_engine.sources.urls import SourceUrl


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A repository at one moment."""

    sha: str
    files: dict[str, RemoteFile]
    """By path in the repository."""


class HubSource:
    """See `tp_engine.sources.source.Source`."""

    def __init__(self, url: SourceUrl, endpoint: str | None = None) -> None:
        """Prepare for ``url``; ``endpoint`` is the Hub's address, None for the usual one."""
        self._url = url
        self._repo = f"{url.authority}/{url.segments[0]}"
        self._folder = "".join(f"{part}/" for part in url.segments[1:])
        self._api = HfApi(endpoint=endpoint)
        self._files = HfFileSystem(endpoint=endpoint, use_listings_cache=False)
        self._commit: Commit | None = None

    def close(self) -> None:
        """Nothing: the Hub's client keeps its connections."""

    def stat(self, name: str) -> RemoteFile:
        """Describe a file of the commit."""
        path = self._folder + name
        found = self._resolved().files.get(path)
        if found is None:
            raise SourceError("source_missing", f"{self._url} has no {path}")
        return found

    @contextmanager
    def blocks(self, file: RemoteFile, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """The content from ``offset``."""
        path = f"{self._repo}@{self._resolved().sha}/{self._folder}{file.name}"
        with (
            self._told(),
            self._files.open(path, "rb", block_size=BLOCK_BYTES, cache_type="none") as opened,
        ):
            yield offset, read_blocks(opened, offset, file.size)

    def _resolved(self) -> Commit:
        if self._commit is None:
            if constants.HF_HUB_OFFLINE:
                raise SourceError("source_failed", f"{self._url}: HF_HUB_OFFLINE is set")
            with self._told():
                info = self._api.model_info(
                    self._repo, revision=self._url.revision, files_metadata=True, timeout=30.0
                )
            files = {}
            for entry in info.siblings or ():
                files[entry.rfilename] = RemoteFile(
                    name=entry.rfilename.removeprefix(self._folder),
                    size=entry.size or 0,
                    tag=f"{info.sha}/{entry.blob_id}",
                    sha256=None if entry.lfs is None else entry.lfs.sha256,
                )
            assert info.sha is not None
            self._commit = Commit(sha=info.sha, files=files)
        return self._commit

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What the Hub's client raises, as what a `Source` raises."""
        try:
            yield
        except GatedRepoError as error:
            text = f"{self._url} is gated: accept its terms and set HF_TOKEN"
            raise SourceError("source_denied", text) from error
        except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
            text = f"{self._url} is not on the Hub, or only for who has another HF_TOKEN"
            raise SourceError("source_missing", text) from error
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                raise SourceError("source_denied", f"{self._url}: {error}") from error
            if status < 500 and status not in (408, 425, 429):
                raise SourceError("source_failed", f"{self._url}: {error}") from error
            raise SourceBroken(f"{self._url}: {error}") from error
        except (httpx.HTTPError, OSError) as error:
            raise SourceBroken(f"{self._url}: {error}") from error
