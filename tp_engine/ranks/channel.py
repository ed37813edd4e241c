"""How plans travel from rank 0 to all ranks."""

from __future__ import annotations

import numpy as np
import torch

from tp_engine.ranks.comm import Comm
from tp_engine.steps.plan import HEADER_WORDS, IntArray, StepPlan

FIRST_WORDS = 4096
"""Words of the one broadcast that carries most plans whole; a longer plan needs a second one."""

assert FIRST_WORDS >= HEADER_WORDS


class PlanChannel:
    """Broadcasts plans; every rank must call once per plan, rank 0 `send`, the others `receive`."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._first = torch.zeros(FIRST_WORDS, dtype=torch.int64)

    def send(self, plan: StepPlan) -> None:
        """Rank 0: give the plan to all ranks; returns when it is on its way."""
        if self._comm.world == 1:
            return
        words = plan.encode()
        head = words[:FIRST_WORDS]
        self._first[: head.size] = torch.from_numpy(head)
        self._comm.broadcast_control(self._first)
        if words.size > FIRST_WORDS:
            self._comm.broadcast_control(torch.from_numpy(words[FIRST_WORDS:].copy()))

    def receive(self) -> StepPlan:
        """Other ranks: wait for the next plan.

        Raises:
            PlanError: the plan cannot be read.
            RuntimeError: none came within the time limit, or rank 0 is gone.
        """
        words: IntArray = self._comm.broadcast_control(self._first).numpy().copy()
        total = int(words[4])
        if total > FIRST_WORDS:
            rest = torch.empty(total - FIRST_WORDS, dtype=torch.int64)
            words = np.concatenate([words, self._comm.broadcast_control(rest).numpy()])
        return StepPlan.decode(words)
