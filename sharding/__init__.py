"""Index arithmetic, checkpoint reading, NF4 and LoRA cuts. No process group inside."""

from sharding.blocks import stack_rows
from sharding.checkpoint import Checkpoint
from sharding.cut import (
    SITES,
    TOP,
    VOCAB_SITES,
    LayerCut,
    ModelDims,
    RankCut,
    WeightSlice,
    cut_model,
    is_row_parallel,
    weight_slice,
)
from sharding.header import CheckpointError, TensorInfo, read_header
from sharding.lora import cut_lora
from sharding.nf4 import BnbTensor
from sharding.quantize import MatrixSource, quantize_slice
from sharding.stored import StoredTensor
from sharding.table import cut_table
from sharding.units import Span, deal
from sharding.whole import ExpandedNF4, assemble, expand

__all__ = [
    "SITES",
    "TOP",
    "VOCAB_SITES",
    "BnbTensor",
    "Checkpoint",
    "CheckpointError",
    "ExpandedNF4",
    "LayerCut",
    "MatrixSource",
    "ModelDims",
    "RankCut",
    "Span",
    "StoredTensor",
    "TensorInfo",
    "WeightSlice",
    "assemble",
    "cut_lora",
    "cut_model",
    "cut_table",
    "deal",
    "expand",
    "is_row_parallel",
    "quantize_slice",
    "read_header",
    "stack_rows",
    "weight_slice",
]
