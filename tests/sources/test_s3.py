"""Fetching from an S3 server of this process."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

from tests.sources.bucket import empty_bucket
from tests.sources.web import CONFIG, WEIGHTS, adapter_bytes
from tp_engine.sources import (
    AllowedSources,
    FetchArea,
    FetchLimits,
    FetchProgress,
    SourceError,
    fetch,
    open_source,
)
from tp_engine.sources import files as reading
from tp_engine.sources.errors import SourceBroken, SourceChanged, SourceErrorCode
from tp_engine.sources.s3 import S3Source

ALLOWED = AllowedSources(["s3://bucket/team"])
LIMITS = FetchLimits(max_bytes=10**6, attempts=2, pause=0.01)


@pytest.fixture(scope="module")
def bucket() -> Iterator[s3fs.S3FileSystem]:
    """An empty bucket; the environment leads to it."""
    with empty_bucket() as files:
        yield files


@pytest.fixture
def s3(bucket: s3fs.S3FileSystem) -> s3fs.S3FileSystem:
    """The bucket with an adapter ``team/x``."""
    put(bucket, adapter_bytes())
    return bucket


def put(files: s3fs.S3FileSystem, content: dict[str, bytes], path: str = "team/x") -> None:
    for name, data in content.items():
        files.pipe(f"bucket/{path}/{name}", data)


def bring(area: FetchArea, text: str = "s3://bucket/team/x", **options: Any) -> dict[str, bytes]:
    url = ALLOWED.find(text)
    assert url is not None
    source, claim = open_source(url, ALLOWED), area.claim(str(url))
    keep = True
    try:
        fetch(source, claim, options.pop("limits", LIMITS), FetchProgress(), {})
        keep = False
        return {name: (claim.path / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    finally:
        claim.release(keep=keep)
        source.close()


def test_what_comes_is_what_is_there(s3: s3fs.S3FileSystem, area: FetchArea) -> None:
    assert bring(area) == adapter_bytes()
    put(s3, adapter_bytes(seed=1))  # nothing is remembered of the one before
    assert bring(area) == adapter_bytes(seed=1)


def test_a_broken_fetch_goes_on_from_where_it_stood(
    s3: s3fs.S3FileSystem, area: FetchArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 50_000)
    ranged, asked = s3fs.core._fetch_range, []

    def breaks(*arguments: Any, **options: Any) -> bytes:
        asked.append(arguments[4])
        if len(asked) in (4, 5, 6):
            raise OSError("connection reset")
        data: bytes = ranged(*arguments, **options)
        return data

    monkeypatch.setattr(s3fs.core, "_fetch_range", breaks)
    with pytest.raises(SourceError, match="connection reset") as error:
        bring(area)
    assert error.value.code == "source_failed"
    assert bring(area) == adapter_bytes()
    assert asked[1:] == [0, 50_000, 100_000, 100_000, 100_000, 100_000, 150_000, 200_000, 250_000]


def test_content_that_changes_between_ranges_is_never_mixed(
    s3: s3fs.S3FileSystem, monkeypatch: pytest.MonkeyPatch, area: FetchArea
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 50_000)
    url = ALLOWED.find("s3://bucket/team/x")
    assert url is not None
    source = S3Source(url)
    file = source.stat(WEIGHTS)
    with pytest.raises(SourceChanged), source.blocks(file, 0) as (_, blocks):
        assert next(blocks) == adapter_bytes()[WEIGHTS][:50_000]
        put(s3, adapter_bytes(seed=1))
        next(blocks)
    with pytest.raises(SourceChanged), source.blocks(file, 50_000):
        pass
    assert bring(area) == adapter_bytes(seed=1)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("s3://bucket/team/nothing", "source_missing"),
        ("s3://bucket/team", "source_missing"),
        ("s3://bucket/team/folder", "source_missing"),
    ],
)
def test_what_is_not_there_is_told_so(
    text: str, code: SourceErrorCode, s3: s3fs.S3FileSystem, area: FetchArea
) -> None:
    put(s3, {f"{CONFIG}/below": b""}, "team/folder")
    with pytest.raises(SourceError, match=r"adapter_config.json is not") as error:
        bring(area, text)
    assert error.value.code == code


def test_too_many_bytes_are_refused(s3: s3fs.S3FileSystem, area: FetchArea) -> None:
    with pytest.raises(SourceError, match="--adapter-max-bytes is 1000"):
        bring(area, limits=FetchLimits(max_bytes=1000))


def test_without_keys_or_server_the_reason_is_told(
    s3: s3fs.S3FileSystem, area: FetchArea, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    url = ALLOWED.find("s3://bucket/team/x")
    assert url is not None
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    since = time.monotonic()
    with pytest.raises(SourceBroken, match="Could not connect"):
        S3Source(url).stat(CONFIG)
    assert time.monotonic() - since < 30
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "nothing"))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(SourceError, match=r"[Cc]redentials") as error:
        S3Source(url).stat(CONFIG)
    assert error.value.code == "source_denied"
