"""Mailboxes are used by all ranks or by none."""

from typing import Any

import pytest
import torch

from kernels.reduce import Mailboxes
from tests.kernels.mailboxes import make_world
from tp_engine.ranks import symmetric
from tp_engine.ranks.comm import Comm
from tp_engine.ranks.symmetric import share_mailboxes

CPU = torch.device("cpu")


class Agreeing(Comm):
    """Rank 0 of two; the other one answers as it was told to."""

    others: list[int]

    def gather_numbers(self, values: list[int]) -> list[list[int]]:
        return [values, [self.others.pop(0)]]


def pair(*others: int) -> Comm:
    comm = Agreeing(rank=0, world=2, device=CPU, ordered=False)
    object.__setattr__(comm, "others", list(others))
    return comm


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Row bytes of every mapping; nothing has been mapped before."""
    calls: list[int] = []

    def map_mailboxes(comm: Comm, row_bytes: int) -> Mailboxes:
        calls.append(row_bytes)
        return make_world(2, CPU)[0]

    monkeypatch.setattr(symmetric, "_MAPPED", {})
    monkeypatch.setattr(symmetric, "_reaches_peers", lambda device: True)
    monkeypatch.setattr(symmetric, "_map_mailboxes", map_mailboxes)
    return calls


def test_a_mapping_is_made_once_for_a_width(mapped: list[int]) -> None:
    first, second = (share_mailboxes(pair(1, 1), 1024) for _ in range(2))
    assert first.mailboxes is not None and first.mailboxes is second.mailboxes
    assert share_mailboxes(pair(1, 1), 2048).mailboxes is not first.mailboxes
    assert mapped == [1024, 2048]


def test_one_gpu_that_reaches_no_other_keeps_all_from_it(mapped: list[int]) -> None:
    assert share_mailboxes(pair(0), 1024).mailboxes is None
    assert mapped == []


@pytest.mark.parametrize("other", [0, 1])
def test_one_failed_mapping_keeps_all_from_it(
    mapped: list[int], monkeypatch: pytest.MonkeyPatch, other: int
) -> None:
    def fail(comm: Comm, row_bytes: int) -> Any:
        raise RuntimeError("the driver says no")

    monkeypatch.setattr(symmetric, "_map_mailboxes", fail)
    assert share_mailboxes(pair(1, other), 1024).mailboxes is None
    assert symmetric._MAPPED == {}


def test_ranks_on_several_hosts_reach_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert not symmetric._reaches_peers(torch.device("cuda", 0))
