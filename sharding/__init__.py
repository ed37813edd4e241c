"""Index arithmetic, checkpoint reading, NF4 and LoRA cuts. No process group inside."""

from sharding.checkpoint import Checkpoint
from sharding.cut import (
    SITES,
    LayerCut,
    ModelDims,
    RankCut,
    WeightSlice,
    cut_model,
    weight_slice,
)
from sharding.header import CheckpointError, TensorInfo, read_header
from sharding.lora import cut_lora
from sharding.stored import StoredTensor
from sharding.units import Span, deal

__all__ = [
    "SITES",
    "Checkpoint",
    "CheckpointError",
    "LayerCut",
    "ModelDims",
    "RankCut",
    "Span",
    "StoredTensor",
    "TensorInfo",
    "WeightSlice",
    "cut_lora",
    "cut_model",
    "deal",
    "read_header",
    "weight_slice",
]
