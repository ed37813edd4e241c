"""What the HTTP front end costs a token: the real process between a made-up engine and sockets.

    python launch/bench/front_end.py [--streams 64] [--steps-per-s 150] [--tokens 256] [--chat]

The engine sends every stream one token a step, as rank 0 does; nothing but the front end does work
worth mentioning. Printed are its processor time a token, the tokens/s that this makes on one core,
and the time from a step's tokens until the client has read the last of their events. There are no
figures when a text is wrong, or when tokens that come too fast share their events.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[2])

import psutil  # noqa: E402 (after the path)

from launch.bench.environment import print_json  # noqa: E402
from launch.bench.tokenizer import write_tokenizer  # noqa: E402
from server.process import start_front_end  # noqa: E402
from server.settings import FrontEndSettings  # noqa: E402
from tp_engine.link import FrontEndLink  # noqa: E402
from tp_engine.messages import ModelCard, Output, Ready, Submit  # noqa: E402

VOCAB = 128256
FIRST_WORD = 1000
PROMPT = [300] * 16
WARM_STEPS = 20
MERGED = 0.05
"""Share of the tokens that may share an event: the front end merges what it comes to late."""


@dataclass(slots=True)
class Stream:
    """One open answer, as its client sees it."""

    connection: socket.socket
    data: bytearray = field(default_factory=bytearray)
    tokens: int = 0

    def read(self) -> bool:
        """Take what has come; whether it was the end."""
        part = self.connection.recv(1 << 16)
        assert part, "the front end has closed a stream"
        seen = max(0, len(self.data) - 1)
        self.data += part
        self.tokens += self.data.count(b" w", seen)  # as every word of the tokenizer begins
        return b"[DONE]" in part

    def texts(self) -> list[str]:
        """The text of each event."""
        found = []
        for line in bytes(self.data).splitlines():
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                found.append(choice["text"] if "text" in choice else choice["delta"]["content"])
        return found


@contextmanager
def front_end(directory: Path) -> Iterator[tuple[FrontEndLink, psutil.Process, int]]:
    """The front end's link, process and port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    link = FrontEndLink()
    process = start_front_end(
        FrontEndSettings(
            to_engine=link.to_engine,
            to_front_end=link.to_front_end,
            parent_pid=os.getpid(),
            model_directory=str(directory),
            port=port,
        )
    )
    try:
        card = ModelCard(name="base", root="made-up")
        link.send([Ready(models=[card], max_model_len=8192, vocab_size=VOCAB)])
        yield link, psutil.Process(process.pid), port
    finally:
        process.kill()
        process.wait()
        link.close()


def open_stream(port: int, tokens: int, *, chat: bool) -> Stream:
    """Send one request."""
    body: dict[str, Any] = {"model": "base", "max_tokens": tokens, "stream": True}
    if chat:
        body["messages"] = [{"role": "user", "content": "hello"}]
    else:
        body["prompt"] = PROMPT
    text = json.dumps(body).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(text)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(head.encode() + text)
    return Stream(connection)


def wait_until_ready(port: int) -> None:
    """Return once the front end serves."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(b"GET /ready HTTP/1.1\r\nhost: b\r\nconnection: close\r\n\r\n")
                if b" 200 " in connection.recv(4096).split(b"\r\n")[0]:
                    return
        except ConnectionError:
            pass  # it does not listen yet
        assert time.monotonic() < deadline, "the front end does not start"
        time.sleep(0.05)


def word(stream: int, step: int) -> int:
    """The token of a stream at a step; a text of its own."""
    return FIRST_WORD + (stream * 7919 + step * 104729) % (VOCAB - FIRST_WORD)


class MadeUpEngine(threading.Thread):
    """Answers the first requests that come, all in step."""

    def __init__(self, link: FrontEndLink, streams: int, tokens: int, pause: float) -> None:
        super().__init__(daemon=True)
        self._link = link
        self._streams = streams
        self._tokens = tokens
        self._pause = pause
        self.stopping = threading.Event()
        self.sent: list[float] = []
        """When the tokens of each step were sent."""

    def run(self) -> None:
        """Wait for all requests, then send a token to each every ``pause`` seconds."""
        submits: list[Submit] = []
        while len(submits) < self._streams:
            submits += [m for m in self._link.receive(0.1) if isinstance(m, Submit)]
        due = time.perf_counter()
        for step in range(self._tokens):
            due += self._pause
            time.sleep(max(0.0, due - time.perf_counter()))
            self.sent.append(time.perf_counter())
            self._link.send([self._output(submit, i, step) for i, submit in enumerate(submits)])
        while not self.stopping.is_set():
            self._link.receive(0.05)  # also sends what could not be sent

    def _output(self, submit: Submit, stream: int, step: int) -> Output:
        return Output(
            request_id=submit.request_id,
            tokens=[word(stream, step)],
            finish_reason="length" if step == self._tokens - 1 else None,
            completion_tokens=step + 1,
        )


def follow(streams: list[Stream], process: psutil.Process) -> tuple[list[float], float]:
    """Read all streams to their end.

    Returns:
        When the last token of each step was read, and the processor time in seconds that the front
        end took after the first `WARM_STEPS` of them.
    """
    read_at: list[float] = []
    before = 0.0
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.connection, selectors.EVENT_READ, stream)
        tokens = 0
        while selector.get_map():
            for key, _ in selector.select(30):
                stream = key.data
                tokens -= stream.tokens
                if stream.read():
                    selector.unregister(stream.connection)
                tokens += stream.tokens
            now = time.perf_counter()
            while len(read_at) < tokens // len(streams):
                read_at.append(now)
                if len(read_at) == WARM_STEPS:
                    before = processor_seconds(process)
    return read_at, processor_seconds(process) - before


def processor_seconds(process: psutil.Process) -> float:
    """User and system time so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """One run.

    Raises:
        SystemExit: an event is missing, merged with another, or out of order.
    """
    streams, tokens = arguments.streams, arguments.tokens
    with front_end(directory) as (link, process, port):
        engine = MadeUpEngine(link, streams, tokens, 1 / arguments.steps_per_s)
        engine.start()
        wait_until_ready(port)
        # One after the other, so that the engine numbers them as this list does.
        answers = [open_stream(port, tokens, chat=arguments.chat) for _ in range(streams)]
        read_at, seconds = follow(answers, process)
        engine.stopping.set()
        engine.join()
    texts = [[text for text in answer.texts() if text] for answer in answers]
    expected = [
        "".join(f" w{word(i, step) - 256:x}" for step in range(tokens)) for i in range(streams)
    ]
    if sorted(map("".join, texts)) != sorted(expected):
        raise SystemExit("the streams' text is not what was sent: no figures")
    alone = sum(map(len, texts)) / (streams * tokens)
    if alone < 1 - MERGED:
        raise SystemExit(f"only {alone:.3f} events a token, it can't keep up: no figures")
    delays = [read - sent for read, sent in zip(read_at, engine.sent, strict=False)][WARM_STEPS:]
    each = seconds / (streams * (tokens - WARM_STEPS))
    return {
        "us_per_token": round(1e6 * each, 1),
        "events_per_token": round(alone, 4),
        "tokens_per_s_a_core": round(1 / each),
        "delay_ms_p50": round(1000 * statistics.median(delays), 2),
        "delay_ms_p99": round(1000 * statistics.quantiles(delays, n=100)[98], 2),
    }


def main() -> None:
    """Measure and print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64, help="at a time (%(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="of each of them (%(default)s)")
    parser.add_argument(
        "--steps-per-s", type=float, default=150.0, help="of the made-up engine (%(default)s)"
    )
    parser.add_argument(
        "--chat", action="store_true", help="chat completions instead of completions"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        results = measure(arguments, write_tokenizer(Path(name), VOCAB))
    print_json("front_end", {**vars(arguments), **results})


if __name__ == "__main__":
    main()
