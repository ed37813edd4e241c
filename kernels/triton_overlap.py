# mypy: ignore-errors
"""How a kernel meets its neighbours: see `kernels.overlap`."""

import triton
import triton.language as tl


@triton.jit
def begin(USE_PDL: tl.constexpr):
    """Wait for the launches before this one, and let the next one start; until then only what no
    kernel of a step writes may be read.

    Every program passes here, even one without work: a launch that ended without waiting would
    let its follower run beside its forerunner. The follower starts only afterwards, so that what
    it reads early was complete before this launch's forerunner ended.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
