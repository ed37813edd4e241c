"""What every rank does with a plan, and the loop of the ranks that only follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tp_engine.adapters import AdapterImage
from tp_engine.channel import PlanChannel
from tp_engine.comm import Comm
from tp_engine.delivery import Delivery
from tp_engine.plan import PlanKind, StepPlan
from tp_engine.runner import Runner
from tp_engine.sampling import Sampled


class Worker:
    """A rank as the plans see it."""

    def __init__(self, comm: Comm, runner: Runner) -> None:
        self.comm = comm
        self.runner = runner
        self.channel = PlanChannel(comm)
        self.delivery = Delivery(comm, runner.arena.layout.page_bytes)

    def run(self, plan: StepPlan, images: Sequence[AdapterImage] | None = None) -> Sampled | None:
        """Carry out a plan that is already known.

        Args:
            plan: any kind.
            images: on rank 0 with DELIVER, the adapter's image for each rank.
        """
        if plan.kind is PlanKind.STEP:
            return self.runner.execute(plan)
        if plan.kind is PlanKind.DELIVER:
            handle, pages, words = plan.register.tolist()
            self.delivery.begin(handle, pages, words, images)
        elif plan.kind is PlanKind.REGISTER:
            handle = int(plan.register[0])
            self.runner.register(handle, self.delivery.take(handle))
        elif plan.kind is PlanKind.CAPTURE:
            self.runner.capture(plan.max_rank)
        elif plan.kind is PlanKind.UNREGISTER:
            self.runner.unregister(int(plan.register[0]))
        return None

    def follow(self, progress: Callable[[], None]) -> PlanKind:
        """Ranks ≥ 1: carry out rank 0's plans until it says RETURN or STOP; gives which.

        Args:
            progress: called after every plan; whoever watches this rank measures from there.
        """
        while True:
            plan = self.channel.receive()
            progress()
            if plan.kind in (PlanKind.RETURN, PlanKind.STOP):
                return plan.kind
            self.run(plan)
            progress()
