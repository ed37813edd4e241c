"""Kernels: one folder a family, each with its contract, its reference and its fast paths.

The name is also that of a package on PyPI; `TP_ENGINE` tells this one from it.
"""

from kernels.attention import AttentionBatch
from kernels.dispatch import Ops, ops_for
from kernels.lora import LoraBatch, LoraSegments, LoraTarget
from kernels.nf4 import NF4_CODE, DenseWeight, NF4Weight, Weight

TP_ENGINE = True

__all__ = [
    "NF4_CODE",
    "TP_ENGINE",
    "AttentionBatch",
    "DenseWeight",
    "LoraBatch",
    "LoraSegments",
    "LoraTarget",
    "NF4Weight",
    "Ops",
    "Weight",
    "ops_for",
]
