"""What an adapter does beside deltas of the layers' linear modules, as bits that add up."""

from __future__ import annotations

from enum import IntFlag


class AdapterTraits(IntFlag):
    """What a step must do for an adapter. A step does what any of its adapters needs."""

    NONE = 0
    AFFINE = 1
    """Gains or biases of linear modules (`kernels.lora.LoraAffine`)."""
