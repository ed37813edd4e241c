"""Who is alive: one TCP connection from every rank to rank 0, and a watch on each main thread.

A rank that dies closes its connection, so rank 0 knows at once and by name; one that hangs stops
sending beats, or its own watchdog ends it. The threads here end the process even while the main
thread sits in a collective. torchrun and the front end see the exit and do the rest.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from tp_engine.ranks.comm import Comm

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
GREETING_SECONDS = 2.0
_HELLO = struct.Struct("<qq")


class Watchdog:
    """Ends the process when its main thread stands still, or when torchrun is gone."""

    def __init__(self, rank: int, die: Callable[[str], None], *, torchrun: int | None) -> None:
        """Begin to watch, at first without a limit: loading takes what it takes.

        Args:
            die: called once, from a thread, with the reason in words; must not return.
            torchrun: the process without which no rank may stay, if torchrun started this one.
        """
        self._rank = rank
        self._die = die
        self._parent = torchrun
        self._limit = math.inf
        self._last = time.monotonic()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def limit(self, seconds: float) -> None:
        """From now on the main thread may be silent for so long; ``math.inf`` ends that."""
        self.progress()
        self._limit = seconds

    def progress(self) -> None:
        """The main thread did something."""
        self._last = time.monotonic()

    def _run(self) -> None:
        while True:
            time.sleep(min(BEAT_SECONDS, self._limit / 4))
            if self._parent is not None and os.getppid() != self._parent:
                return self._die("torchrun is gone")
            still = time.monotonic() - self._last
            if still > self._limit:
                log.error("rank %d stands at\n%s", self._rank, _main_stack())
                return self._die(f"rank {self._rank} made no progress for {still:.1f} s")


def _main_stack() -> str:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "".join(traceback.format_stack(frame))


class Liveness:
    """Rank 0's view of its peers, and every peer's view of rank 0."""

    def __init__(self, comm: Comm, timeout: float, die: Callable[[str], None]) -> None:
        """Connect all ranks; every rank must call it.

        Args:
            timeout: seconds of silence after which a rank counts as dead.
            die: called once, from a thread, with the reason in words; must not return.
        """
        self._comm = comm
        self._timeout = timeout
        self._die = die
        self._closing = False
        self._reason: str | None = None
        self._known = threading.Event()
        self._peers: dict[socket.socket, int] = {}
        self._siblings: dict[int, int] = {}
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        if comm.world > 1:
            self._connect()
            self._thread.start()

    def reason(self, wait: float) -> str | None:
        """Why the service must end, if a peer is gone; waits so long for that to show."""
        if self._peers:
            self._known.wait(wait)
        return self._reason

    def close(self) -> None:
        """Peers may leave from now on; rank 0 calls it before it says so, the others after."""
        self._closing = True
        if self._comm.rank != 0 and self._peers:
            self._thread.join()
            for connection in self._peers:
                connection.close()

    def wait_for_peers(self, timeout: float) -> None:
        """Rank 0, last of all: stay until every peer has left, so that none misses the word."""
        if self._peers:
            self._thread.join()
        for peer in self._peers:
            peer.settimeout(timeout)
            with peer, suppress(OSError):  # slow or gone: there is no more to wait for
                while peer.recv(4096):
                    pass

    def _connect(self) -> None:
        listener = _listen() if self._comm.rank == 0 else None
        port = listener.getsockname()[1] if listener else 0
        secret = secrets.randbits(62) if listener else 0
        mine = [port, secret, int(os.environ.get("GROUP_RANK", "-1")), os.getpid()]
        everyone = self._comm.gather_numbers(mine)
        port, secret = everyone[0][:2]
        self._siblings = {
            rank: pid
            for rank, (_, _, group, pid) in enumerate(everyone)
            if group == mine[2] and group >= 0
        }
        if listener is not None:
            with listener:
                self._accept_all(listener, secret)
        else:
            address = os.environ["MASTER_ADDR"], port
            peer = socket.create_connection(address, timeout=self._timeout)
            peer.sendall(_HELLO.pack(secret, self._comm.rank))
            self._peers[peer] = 0
        for peer in self._peers:
            peer.setblocking(False)

    def _accept_all(self, listener: socket.socket, secret: int) -> None:
        deadline = time.monotonic() + self._timeout
        while missing := set(range(1, self._comm.world)) - set(self._peers.values()):
            try:
                listener.settimeout(max(0.0, deadline - time.monotonic()))
                peer, address = listener.accept()
            except (TimeoutError, BlockingIOError):
                raise RuntimeError(
                    f"ranks {sorted(missing)} did not connect to rank 0 within {self._timeout:g} s"
                ) from None
            rank = _greeted(peer, secret)
            if rank in missing:
                self._peers[peer] = rank
            else:
                log.warning("refused a connection from %s: it is not from a rank", address)
                peer.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            self._listen_to(selector)

    def _listen_to(self, selector: selectors.BaseSelector) -> None:
        heard = dict.fromkeys(self._peers, time.monotonic())
        for peer in self._peers:
            selector.register(peer, selectors.EVENT_READ)
        next_beat = time.monotonic()
        while not self._closing:
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_SECONDS
                self._beat()
            for key, _ in selector.select(BEAT_SECONDS / 2):
                speaker = key.fileobj
                assert isinstance(speaker, socket.socket)
                if not self._hear(speaker):
                    return self._report(f"rank {self._peers[speaker]} is gone")
                heard[speaker] = time.monotonic()
            silent = min(heard, key=heard.__getitem__)
            quiet = time.monotonic() - heard[silent]
            if quiet > self._timeout:
                return self._end_silent(self._peers[silent], quiet)

    def _end_silent(self, rank: int, quiet: float) -> None:
        """Report a rank that hangs or is stopped, and do not leave it to torchrun, which would
        wait 30 s for it. Its connection is open, so that its process id is still its own."""
        if rank in self._siblings and not self._closing:
            with suppress(ProcessLookupError):
                os.kill(self._siblings[rank], signal.SIGKILL)
        self._report(f"rank {rank} was silent for {quiet:.1f} s")

    def _hear(self, peer: socket.socket) -> bool:
        try:
            return bool(peer.recv(4096))
        except BlockingIOError:
            return True  # there is nothing to hear after all
        except OSError:  # a network has more ways to break than to reset a connection
            return False

    def _beat(self) -> None:
        for peer in self._peers:
            # A full buffer means it does not read: its silence will tell. A closed one is found
            # when reading from it next.
            with suppress(OSError):
                peer.send(b".")

    def _report(self, reason: str) -> None:
        if self._closing:
            return
        self._reason = reason
        self._known.set()
        self._die(reason)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _greeted(peer: socket.socket, secret: int) -> int | None:
    """The rank at the other end of a new connection, if it is one."""
    peer.settimeout(GREETING_SECONDS)
    with suppress(OSError):  # gone, or waits for something else to be said
        hello = peer.recv(_HELLO.size, socket.MSG_WAITALL)
        if len(hello) == _HELLO.size and _HELLO.unpack(hello)[0] == secret:
            return int(_HELLO.unpack(hello)[1])
    return None
