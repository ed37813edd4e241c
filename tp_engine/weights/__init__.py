"""A rank's share of a checkpoint, read as a stream of slices."""

from tp_engine.weights.loader import load_weights
from tp_engine.weights.reader import WeightError
from tp_engine.weights.types import LayerWeights, RankWeights

__all__ = ["LayerWeights", "RankWeights", "WeightError", "load_weights"]
