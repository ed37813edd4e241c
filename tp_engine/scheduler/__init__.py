"""Requests, the policy that picks their work, and the plans made of it."""

from tp_engine.scheduler.planner import Planner
from tp_engine.scheduler.request import Request, Work
from tp_engine.scheduler.scheduler import Scheduler, SchedulerCounters

__all__ = ["Planner", "Request", "Scheduler", "SchedulerCounters", "Work"]
