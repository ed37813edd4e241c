"""A stand-in for the server, with `/ready` and echoing chat streams.

Arguments: PORT [--child] (starts a child of its own) [--stubborn] (ignores SIGTERM).
Model `unknown` is a 404, model `broken` an error in mid-stream.
"""

import json
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers what the demo asks."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if request["model"] == "unknown":
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "no such model"}}')
            return
        self.send_response(200)
        self.end_headers()
        for event in events(request):
            self.wfile.write(f"data: {event}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


def events(request: dict) -> list[str]:
    words = [f"{request['model']}: ", request["messages"][0]["content"]]
    chunks = [{"choices": [{"delta": {"content": word}}], "usage": None} for word in words]
    if request["model"] == "broken":
        chunks[1] = {"error": {"message": "out of pages"}}
    first = {"choices": [{"delta": {"role": "assistant"}}]}
    last = {"choices": [], "usage": {"completion_tokens": len(words)}}
    return [*(json.dumps(chunk) for chunk in (first, *chunks, last)), "[DONE]"]


if __name__ == "__main__":
    if "--stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "--child" in sys.argv:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

        def leave(number: int, frame: object) -> None:
            child.terminate()
            child.wait()
            sys.exit(1)

        signal.signal(signal.SIGTERM, leave)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
