"""Python itself in a process that serves: what goes on beside the steps may not hold them up."""

from __future__ import annotations

import gc
import sys

SWITCH_SECONDS = 0.0005
"""After which a thread that runs Python code lets another one run that wants to. By default it is
0.005, longer than a step: the loop would wait so long each time that it comes back from the GPU
while another thread checks or packs an adapter."""


def ready_interpreter() -> None:
    """Let threads take short turns, and spare the garbage collector what exists now: modules,
    weights, the application.

    A full collection looks at all objects, about 200,000 once torch and transformers are loaded:
    0.2 s in which no step begins and no token is sent.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
