"""Fetching from a Hub of this process: of one commit, and checked against its sums."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import HfFileSystem, constants

from tests.sources.web import CONFIG, WEIGHTS, adapter_bytes
from tp_engine.sources import (
    AllowedSources,
    FetchArea,
    FetchLimits,
    FetchProgress,
    SourceError,
    fetch,
)
from tp_engine.sources import files as reading
from tp_engine.sources.errors import SourceErrorCode
from tp_engine.sources.hub import HubSource

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ALLOWED = AllowedSources(["hf://org"])


class _Hub(BaseHTTPRequestHandler):
    """One repository, org/name, with an adapter in its folder ``sub``."""

    content: dict[str, bytes]
    wrong_sum: bool
    asked: list[tuple[str, str | None]]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self._json([self._entry(path) for path in body["paths"] if path in self.content])

    def do_GET(self) -> None:
        path, ranged = self.path.partition("?")[0].strip("/"), self.headers.get("range")
        self.asked.append((path, ranged))
        if "org/gated" in path:
            self._answer(403, b"", {"X-Error-Code": "GatedRepo"})
        elif "org/name" not in path:
            self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        elif path.endswith("revision/nothing"):
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(f"api/models/org/name/tree/{COMMIT}"):
            self._json([self._entry(name) for name in self.content])
        elif path.startswith("api/"):
            siblings = [self._entry(name) | {"rfilename": name} for name in self.content]
            self._json({"id": "org/name", "sha": COMMIT, "siblings": siblings})
        else:
            data = self.content[path.partition(f"resolve/{COMMIT}/")[2]]
            start, end = 0, len(data)
            if ranged is not None:
                first, _, last = ranged.removeprefix("bytes=").partition("-")
                start, end = int(first), int(last) + 1
            self._answer(206 if ranged else 200, data[start:end], {})

    def _entry(self, path: str) -> dict[str, Any]:
        data = self.content[path]
        entry = {"type": "file", "path": path, "size": len(data), "oid": path, "blobId": path}
        if path.endswith(WEIGHTS):
            sha = "0" * 64 if self.wrong_sum else hashlib.sha256(data).hexdigest()
            lfs = {"size": len(data), "oid": sha, "sha256": sha, "pointerSize": 100}
            return entry | {"lfs": lfs}
        return entry

    def _json(self, content: Any) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the tests' output quiet."""


@contextmanager
def serving(handler: type[_Hub]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[_Hub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    HfFileSystem.clear_instance_cache()
    content = {f"sub/{name}": data for name, data in adapter_bytes().items()}
    return type("Hub", (_Hub,), {"content": content, "wrong_sum": False, "asked": []})


def bring(hub: type[_Hub], area: FetchArea, text: str = "org/name@v1/sub") -> dict[str, bytes]:
    url = ALLOWED.find(f"hf://{text}")
    assert url is not None
    with serving(hub) as endpoint:
        claim = area.claim(str(url))
        try:
            limits = FetchLimits(max_bytes=10**6, attempts=1)
            fetch(HubSource(url, endpoint), claim, limits, FetchProgress(), {})
            return {name: (claim.path / name).read_bytes() for name in (CONFIG, WEIGHTS)}
        finally:
            claim.release(keep=False)


def test_what_comes_is_of_one_commit_in_ranges(
    hub: type[_Hub], area: FetchArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BLOCK_BYTES", 200_000)
    assert bring(hub, area) == adapter_bytes()
    assert hub.asked[0] == ("api/models/org/name/revision/v1", None)
    content = [(path, ranged) for path, ranged in hub.asked if "/resolve/" in path]
    assert content[1:] == [
        (f"org/name/resolve/{COMMIT}/sub/{WEIGHTS}", "bytes=0-199999"),
        (f"org/name/resolve/{COMMIT}/sub/{WEIGHTS}", "bytes=200000-299999"),
    ]


def test_content_with_another_sum_than_the_hubs_is_refused(
    hub: type[_Hub], area: FetchArea
) -> None:
    hub.wrong_sum = True
    with pytest.raises(SourceError) as error:
        bring(hub, area)
    assert error.value.code == "checksum_mismatch"


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("org/name/other", "source_missing", "has no other/adapter_config.json"),
        ("org/name@nothing", "source_missing", "is not on the Hub"),
        ("org/missing", "source_missing", "is not on the Hub"),
        ("org/gated", "source_denied", "is gated"),
    ],
)
def test_troubles_are_told_apart(
    text: str, code: SourceErrorCode, reason: str, hub: type[_Hub], area: FetchArea
) -> None:
    with pytest.raises(SourceError, match=reason) as error:
        bring(hub, area, text)
    assert error.value.code == code


def test_offline_nothing_is_asked(
    hub: type[_Hub], area: FetchArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match="HF_HUB_OFFLINE is set"):
        bring(hub, area)
    assert hub.asked == []
