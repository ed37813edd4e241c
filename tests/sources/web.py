"""A web server that tests tell how to misbehave."""

from __future__ import annotations

import hashlib
import json
import random
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_bytes(seed: int = 0, size: int = 300_000) -> dict[str, bytes]:
    """A config, and weights of ``size`` bytes that begin as safetensors do."""
    content = random.Random(seed).randbytes(size - 10)
    return {
        CONFIG: json.dumps({"r": 8, "seed": seed}).encode(),
        WEIGHTS: (2).to_bytes(8, "little") + b"{}" + content,
    }


@dataclass
class Web:
    """What is served, and how; tests change it while it is served."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    """By path, without the first slash."""
    redirects: dict[str, str] = field(default_factory=dict)
    """Path -> where it leads."""
    statuses: list[int] = field(default_factory=list)
    """Answers to the next requests, in place of what they ask for."""
    break_after: list[int] = field(default_factory=list)
    """Bodies that end after so many bytes, the next first; then all are whole."""
    tags: Callable[[bytes], str | None] = field(
        default=lambda data: f'"{hashlib.sha256(data).hexdigest()}"'
    )
    headers: dict[str, str] = field(default_factory=dict)
    """Sent in place of the right ones; an empty value: left out."""
    ranges: bool = True
    head_length: bool = True
    gate: threading.Event = field(default_factory=threading.Event)
    """Closed: bodies stop in the middle until it opens."""
    before_body: Callable[[str], None] | None = None
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    """(method, path, range) of every request."""
    sent: int = 0
    """Bytes of bodies."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    web: Web

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        web = self.web
        path = self.path.partition("?")[0].removeprefix("/")
        web.asked.append((self.command, path, self.headers.get("range")))
        if web.statuses:
            self._answer(web.statuses.pop(0), b"", {})
        elif path in web.redirects:
            self._answer(302, b"", {"Location": web.redirects[path]})
        elif path in web.files:
            self._file(path)
        else:
            self._answer(404, b"", {})

    def _file(self, path: str) -> None:
        web, data = self.web, self.web.files[path]
        tag = web.tags(data)
        headers = {} if tag is None else {"ETag": tag}
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        condition = self.headers.get("if-range")
        if web.ranges and wanted and condition in (None, tag) and int(wanted[1]) < len(data):
            start = int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._answer(206, data[start:], headers)
        else:
            self._answer(200, data, headers)
        if self.command == "GET" and web.before_body is not None:
            web.before_body(path)

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        web = self.web
        self.send_response(status)
        length = "" if self.command == "HEAD" and not web.head_length else str(len(body))
        for name, value in {"Content-Length": length, **headers, **web.headers}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command != "GET" or status not in (200, 206):
            return
        stop = web.break_after.pop(0) if web.break_after else len(body)
        half = min(stop, len(body) // 2)
        self._send(body[:half])
        web.gate.wait()
        self._send(body[half:stop])
        if stop < len(body) or web.headers:
            self.close_connection = True

    def _send(self, data: bytes) -> None:
        try:
            self.wfile.write(data)
            self.wfile.flush()
            self.web.sent += len(data)
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the tests' output quiet."""


@contextmanager
def web_server(tls: ssl.SSLContext | None = None) -> Iterator[Web]:
    """Serve until the block ends, by HTTPS if ``tls`` is given."""
    web = Web()
    web.gate.set()
    handler = type("Handler", (_Handler,), {"web": web})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    web.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield web
    finally:
        web.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
