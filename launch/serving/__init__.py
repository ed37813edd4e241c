"""A serving rank from its options to its exit: rank 0 in `lead`, the others in `follow`."""

from launch.serving.run import run_rank

__all__ = ["run_rank"]
