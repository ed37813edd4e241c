"""Connections between ranks: only ranks get one, and a rank that leaves is named."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from tp_engine.ranks.comm import Comm
from tp_engine.ranks.liveness import Liveness, Watchdog


class World:
    """As many `Comm`s as there are ranks, for threads of one process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.given: dict[int, list[int]] = {}
        self._all = threading.Barrier(size)

    def comm(self, rank: int) -> Comm:
        return cast("Comm", _ThreadComm(self, rank))

    def gather(self, rank: int, values: list[int]) -> list[list[int]]:
        self.given[rank] = values
        self._all.wait(10)
        return [self.given[each] for each in range(self.size)]


class _ThreadComm:
    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.world, self._world = rank, world.size, world

    def gather_numbers(self, values: list[int]) -> list[list[int]]:
        return self._world.gather(self.rank, values)


@pytest.fixture(autouse=True)
def one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("GROUP_RANK", raising=False)


@contextmanager
def connected(size: int, timeout: float, reasons: list[tuple[int, str]]) -> Iterator[list[Any]]:
    """Liveness of every rank; what each would die of is appended to ``reasons``."""
    world, found = World(size), [None] * size

    def connect(rank: int) -> None:
        found[rank] = Liveness(
            world.comm(rank), timeout, lambda reason: reasons.append((rank, reason))
        )  # type: ignore[call-overload]

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    yield found
    for each in found:
        each.close()
    found[0].wait_for_peers(1.0)


def wait_for(reasons: list[tuple[int, str]], count: int) -> None:
    deadline = time.monotonic() + 10
    while len(reasons) < count and time.monotonic() < deadline:
        time.sleep(0.02)


def test_ranks_that_live_hear_of_each_other() -> None:
    reasons: list[tuple[int, str]] = []
    with connected(3, 1.5, reasons) as ranks:
        time.sleep(2.5)
        assert [each.reason(0) for each in ranks] == [None, None, None]
    assert reasons == []


def test_a_rank_that_leaves_is_named() -> None:
    reasons: list[tuple[int, str]] = []
    with connected(3, 5.0, reasons) as ranks:
        ranks[2].close()
        assert ranks[0].reason(5.0) == "rank 2 is gone"
        wait_for(reasons, 1)
    assert reasons == [(0, "rank 2 is gone")]


@pytest.mark.parametrize(
    ("error", "lives"),
    [
        (ConnectionResetError(104, "reset"), False),
        (TimeoutError(110, "timed out"), False),
        (OSError(113, "No route to host"), False),
        (BlockingIOError(11, "nothing there"), True),
    ],
)
def test_a_connection_that_breaks_in_whatever_way_is_a_rank_that_is_gone(
    error: OSError, lives: bool
) -> None:
    class Broken:
        def recv(self, size: int) -> bytes:
            raise error

    liveness = object.__new__(Liveness)
    assert liveness._hear(cast("socket.socket", Broken())) == lives


def test_a_rank_that_falls_silent_is_named() -> None:
    reasons: list[tuple[int, str]] = []
    with connected(2, 1.0, reasons) as ranks:
        ranks[1]._closing = True  # its thread ends, its connection stays
        wait_for(reasons, 1)
    assert reasons[0][0] == 0
    assert reasons[0][1].startswith("rank 1 was silent for 1.")


def test_strangers_are_refused_and_do_not_spoil_the_start() -> None:
    world, reasons = World(2), cast("list[str]", [])
    zero: list[Liveness] = []
    thread = threading.Thread(
        target=lambda: zero.append(Liveness(world.comm(0), 8.0, reasons.append))
    )
    thread.start()
    port, secret = world.gather(1, [0, 0, -1, 0])[0][:2]
    with (
        socket.create_connection(("127.0.0.1", port)) as short,
        socket.create_connection(("127.0.0.1", port)) as wrong,
        socket.create_connection(("127.0.0.1", port)) as right,
    ):
        short.sendall(b"GET /")
        short.shutdown(socket.SHUT_WR)
        wrong.sendall((secret + 1).to_bytes(8, "little") + (1).to_bytes(8, "little"))
        right.sendall(secret.to_bytes(8, "little") + (1).to_bytes(8, "little"))
        thread.join(10)
        assert zero and zero[0].reason(0.1) is None
        assert right.recv(1) == b"."
        zero[0].close()
    zero[0].wait_for_peers(1.0)
    assert reasons == []


def test_a_rank_that_never_connects_is_named() -> None:
    world, errors = World(2), cast("list[RuntimeError]", [])

    def lead() -> None:
        try:
            Liveness(world.comm(0), 0.3, lambda reason: None)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=lead)
    thread.start()
    world.gather(1, [0, 0, -1, 0])
    thread.join(10)
    assert "ranks [1] did not connect" in str(errors[0])


def test_a_watchdog_tells_who_stood_still_and_where(caplog: pytest.LogCaptureFixture) -> None:
    reasons: list[str] = []
    dog = Watchdog(3, reasons.append, torchrun=None)
    dog.limit(0.2)
    for _ in range(4):
        time.sleep(0.1)
        dog.progress()
    assert reasons == []
    time.sleep(0.5)
    assert reasons[0].startswith("rank 3 made no progress for 0.")
    assert "test_a_watchdog_tells_who" in caplog.text


def test_a_watchdog_notices_that_torchrun_is_gone() -> None:
    reasons: list[str] = []
    Watchdog(0, reasons.append, torchrun=1)  # not the parent of a test
    time.sleep(0.8)
    assert reasons == ["torchrun is gone"]
