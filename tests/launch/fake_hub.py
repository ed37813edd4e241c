"""A Hugging Face Hub of one process: what the client asks for when it downloads a snapshot."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickled",
    "consolidated.safetensors": b"the same again",
    "onnx/config.json": b"{}",
}
REFUSALS = {"org/gated": (403, "GatedRepo"), "org/missing": (404, "RepoNotFound")}


class _Handler(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        api = parts[0] == "api"
        repo = "/".join(parts[2:4] if api else parts[:2])
        if repo in REFUSALS:
            status, code = REFUSALS[repo]
            self._answer(status, b"", {"X-Error-Code": code})
        elif api and parts[4:] == ["revision", "nothing"]:
            self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif api and parts[4:5] == ["revision"]:
            files = [{"rfilename": name} for name in FILES]
            self._json({"id": repo, "sha": COMMIT, "siblings": files})
        elif api and parts[4:5] == ["tree"]:
            self._json(
                [
                    {"type": "file", "path": name, "size": len(data), "oid": name}
                    for name, data in FILES.items()
                ]
            )
        elif api:
            self._answer(404, b"", {})
        else:
            data = FILES["/".join(parts[4:])]
            tag = hashlib.sha256(data).hexdigest()
            self._answer(200, data, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT})

    def _json(self, content: Any) -> None:
        self._answer(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the tests' output quiet."""


@contextmanager
def fake_hub() -> Iterator[str]:
    """Serve until the block ends; gives the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
