"""Adapters in S3 and what speaks its protocol: ``s3://BUCKET/PATH``, through fsspec and s3fs.

Keys, region and endpoint come from where Amazon's own tools take them: ``AWS_ACCESS_KEY_ID``,
``AWS_ENDPOINT_URL`` and so on, or the role of the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import s3fs
from botocore.exceptions import BotoCoreError, NoCredentialsError
from s3fs.utils import FileExpired

from tp_engine.sources.errors import SourceBroken, SourceChanged, SourceError
from tp_engine.sources.files import BLOCK_BYTES, read_blocks
from tp_engine.sources.source import RemoteFile
from tp_engine.sources.urls import SourceUrl


class S3Source:
    """See `tp_engine.sources.source.Source`. Every range is asked for with ``If-Match``."""

    def __init__(self, url: SourceUrl) -> None:
        """Prepare for ``url``."""
        self._url = url
        self._path = "/".join((url.authority, *url.segments))
        self._files = s3fs.S3FileSystem(use_listings_cache=False)

    def close(self) -> None:
        """Nothing: fsspec keeps its connections for the next source."""

    def stat(self, name: str) -> RemoteFile:
        """Describe an object."""
        with self._told(name):
            found = self._files.info(f"{self._path}/{name}", refresh=True)
        if found["type"] != "file":
            raise SourceError("source_missing", f"{self._url}/{name} is not an object")
        return RemoteFile(name=name, size=int(found["size"]), tag=_tag(found))

    @contextmanager
    def blocks(self, file: RemoteFile, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """The content from ``offset``."""
        path = f"{self._path}/{file.name}"
        with (
            self._told(file.name),
            self._files.open(path, "rb", block_size=BLOCK_BYTES, cache_type="none") as opened,
        ):
            if (opened.size, _tag(opened.details)) != (file.size, file.tag):
                raise SourceChanged(f"{self._url}/{file.name} has changed")
            yield offset, read_blocks(opened, offset, file.size)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """What the libraries below raise, as what a `Source` raises."""
        where = f"{self._url}/{name}"
        try:
            yield
        except FileNotFoundError:
            raise SourceError("source_missing", f"{where} is not there") from None
        except (PermissionError, NoCredentialsError) as error:
            raise SourceError("source_denied", f"{where}: {error}") from error
        except FileExpired as error:
            raise SourceChanged(f"{where} has changed") from error
        except (OSError, BotoCoreError, aiohttp.ClientError) as error:
            raise SourceBroken(f"{where}: {error}") from error


def _tag(found: dict[str, Any]) -> str | None:
    tag = found.get("ETag")
    return None if tag is None else str(tag)
