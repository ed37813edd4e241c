"""What every rank does with a plan, and the loop of the ranks that only follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tp_engine.adapters import AdapterImage
from tp_engine.ranks.background import Ended
from tp_engine.ranks.channel import PlanChannel
from tp_engine.ranks.comm import Comm
from tp_engine.sampling import Sampled
from tp_engine.steps.plan import PlanKind, StepPlan
from tp_engine.steps.runner import Runner
from tp_engine.tiers.copies import Copies
from tp_engine.tiers.delivery import Delivery
from tp_engine.tiers.gains import RankGains
from tp_engine.tiers.host_pages import HostPages


class Worker:
    """A rank as the plans see it."""

    def __init__(self, comm: Comm, runner: Runner, host: HostPages, gains: RankGains) -> None:
        """Bind a rank's parts together; ``host`` is its memory for adapters."""
        self.comm = comm
        self.runner = runner
        self.host = host
        self.channel = PlanChannel(comm)
        self.delivery = Delivery(comm, host, gains.finish)
        arena = runner.arena
        self.copies = Copies(
            comm, host, arena.memory, arena.descriptors, runner.layers, runner.ends
        )

    def run(self, plan: StepPlan, images: Sequence[AdapterImage] | None = None) -> Sampled | None:
        """Carry out a plan that is already known.

        Args:
            plan: any kind.
            images: on rank 0 with DELIVER, the adapter's image for each rank.
        """
        if plan.kind is PlanKind.STEP:
            return self.runner.execute(plan)
        if plan.kind is PlanKind.CAPTURE:
            self.runner.capture(plan.max_rank, plan.traits)
        elif plan.kind is PlanKind.DELIVER:
            handle, words, *pages = plan.adapter.tolist()
            self.delivery.begin(handle, words, pages, images)
        elif plan.kind is PlanKind.COPY:
            handle, descriptor, *pages = plan.adapter.tolist()
            self.copies.begin(handle, descriptor, pages)
        elif plan.kind is PlanKind.FORGET:
            self.host.drop(int(plan.adapter[0]))
        return None

    def arrived(self) -> list[Ended]:
        """See `Delivery.arrived`."""
        return self.delivery.arrived()

    def landed(self) -> list[Ended]:
        """See `Copies.landed`."""
        return self.copies.landed()

    def follow(self, progress: Callable[[], None]) -> PlanKind:
        """Ranks ≥ 1: carry out rank 0's plans until it says RETURN or STOP; gives which.

        Args:
            progress: called after every plan; whoever watches this rank measures from there.

        Raises:
            RuntimeError: what goes on beside the steps failed here; rank 0 only sees a rank that
                does not answer.
        """
        while True:
            plan = self.channel.receive()
            progress()
            if plan.kind in (PlanKind.RETURN, PlanKind.STOP):
                return plan.kind
            self.run(plan)
            self.arrived()
            self.landed()
            progress()
