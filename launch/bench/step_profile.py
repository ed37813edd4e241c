"""Where the time of a decode step goes on the GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

GAPS_SHOWN = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One kernel or copy on the device, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelSum:
    """All launches of one kernel in a step, in microseconds."""

    name: str
    launches: float
    total: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Time between two kernels in which nothing ran, in microseconds a step."""

    before: str
    after: str
    total: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """A mean step, in milliseconds."""

    kernels: list[KernelSum]
    """The longest first."""
    gaps: list[Gap]
    """The longest first; summed up by pair of kernels."""
    kernel_sum: float
    busy: float
    """Time in which anything ran; less than the sum where launches overlap."""
    span: float
    """From the first launch to the end of the last one, profiled, a step."""


def profile_steps(step: Callable[[], object], steps: int) -> StepProfile:
    """Run ``steps`` steps under torch's profiler."""
    torch.cuda.synchronize()
    cuda = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[cuda], acc_events=True) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    launches = [
        Launch(name=event.name, start=event.time_range.start, end=event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch._C._autograd.DeviceType.CUDA
    ]
    return summarise(launches, steps)


def mark_steps(step: Callable[[], object], steps: int) -> None:
    """Run ``steps`` steps as the range that ``ncu --profile-from-start off`` looks at."""
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]  # of torch
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def summarise(launches: Iterable[Launch], steps: int) -> StepProfile:
    """Sum launches up by kernel, a step.

    Raises:
        ValueError: there are none.
    """
    ordered = sorted(launches, key=lambda launch: launch.start)
    if not ordered:
        raise ValueError("launches: none were recorded; the profiler needs a CUDA device")
    counts: dict[str, int] = defaultdict(int)
    totals: dict[str, float] = defaultdict(float)
    idle: dict[tuple[str, str], float] = defaultdict(float)
    busy, until, last = 0.0, ordered[0].start, ""
    for launch in ordered:
        idle[last, launch.name] += max(0.0, launch.start - until)
        counts[launch.name] += 1
        totals[launch.name] += launch.end - launch.start
        busy += max(0.0, launch.end - max(launch.start, until))
        if launch.end >= until:
            until, last = launch.end, launch.name
    kernels = [
        KernelSum(name=name, launches=counts[name] / steps, total=total / steps)
        for name, total in sorted(totals.items(), key=lambda item: -item[1])
    ]
    return StepProfile(
        kernels=kernels,
        gaps=[
            Gap(before=before, after=after, total=total / steps)
            for (before, after), total in sorted(idle.items(), key=lambda item: -item[1])
        ],
        kernel_sum=sum(totals.values()) / steps / 1000,
        busy=busy / steps / 1000,
        span=(until - ordered[0].start) / steps / 1000,
    )


def table(profile: StepProfile, step_ms: float, shown: int = 16) -> str:
    """Lines for people: the sums, then the longest kernels."""
    lines = [
        f"  kernel sum {profile.kernel_sum:.3f} ms = {profile.kernel_sum / step_ms:.3f} of the "
        f"step; device busy {profile.busy:.3f} of {profile.span:.3f} ms under the profiler"
    ]
    lines += [
        f"  {k.total / 1000:8.3f} ms {k.launches:7.1f} x {k.total / k.launches:8.2f} us  "
        f"{k.name[:90]}"
        for k in profile.kernels[:shown]
    ]
    lines += [
        f"  idle {gap.total:8.2f} us between {gap.before[:50]} and {gap.after[:50]}"
        for gap in profile.gaps[:GAPS_SHOWN]
    ]
    return "\n".join(lines)
