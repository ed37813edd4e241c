"""The engine's end of the local sockets to the HTTP front end.

Two one-way ZeroMQ pipes with paths in a private directory. The engine binds both before the front
end starts. Sending never waits: a front end that does not read for long is taken for dead.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import zmq

from tp_engine.interpreter import idle
from tp_engine.messages import Message, ToEngine, decode_to_engine, encode_all

MAX_UNSENT = 10_000
"""Sends that may wait for the front end; a step is one."""
_LONGEST_NAME = "to-front-end"


class FrontEndGone(RuntimeError):
    """The front end does not take messages any more."""


class FrontEndLink:
    """Typed messages to and from the front end."""

    def __init__(self) -> None:
        self._directory = _private_directory()
        self.to_engine = f"ipc://{self._directory}/to-engine"
        self.to_front_end = f"ipc://{self._directory}/to-front-end"
        self._context = zmq.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._pull.set_hwm(0)
        self._pull.bind(self.to_engine)
        self._push = self._context.socket(zmq.PUSH)
        self._push.bind(self.to_front_end)
        self._unsent: deque[bytes] = deque()

    def send(self, messages: Sequence[Message]) -> None:
        """Hand messages over without waiting; what the front end cannot take yet is kept.

        Raises:
            FrontEndGone: more than `MAX_UNSENT` sends wait for it.
        """
        if messages:
            self._unsent.append(encode_all(messages))
        self._flush()
        if len(self._unsent) > MAX_UNSENT:
            raise FrontEndGone(f"the front end has not taken the last {len(self._unsent)} sends")

    def _flush(self) -> None:
        while self._unsent:
            try:
                self._push.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                return  # not connected yet, or slow
            self._unsent.popleft()

    def receive(self, timeout: float) -> list[ToEngine]:
        """All messages that are there, after waiting at most ``timeout`` seconds for the first.

        Whoever waits has no step to run.
        """
        self._flush()
        messages: list[ToEngine] = []
        with idle() if timeout else nullcontext():
            ready = self._pull.poll(int(timeout * 1000))
        if ready:
            while True:
                try:
                    messages += decode_to_engine(self._pull.recv(zmq.NOBLOCK))
                except zmq.Again:
                    break
        return messages

    def close(self) -> None:
        """Drop what nobody has read, and remove the sockets."""
        self._push.close(linger=0)
        self._pull.close(linger=0)
        self._context.term()
        self.remove_files()

    def remove_files(self) -> None:
        """Remove the sockets' files, from any thread; nobody can connect any more."""
        shutil.rmtree(self._directory, ignore_errors=True)


def _private_directory() -> Path:
    """A new directory for this user alone, with a path that leaves room for a socket's name."""
    parent = tempfile.gettempdir()
    name = Path(parent, "tp-engine-xxxxxxxx", _LONGEST_NAME)
    if len(os.fsencode(name)) > zmq.IPC_PATH_MAX_LEN:
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="tp-engine-", dir=parent))  # made with mode 0700
