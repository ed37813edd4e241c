"""How a LoRA pair is cut: the one documented rule."""

import torch

from sharding.cut import WeightSlice

__all__ = ["cut_lora"]


def cut_lora(a: torch.Tensor, b: torch.Tensor, s: WeightSlice) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut A [r, in] and B [out, r] so that their product is the base shard's part of BA.

    Semantics: ``b_shard @ a_shard == (b @ a)[s.rows, s.cols]``. Where the base cuts rows
    (column-parallel), A is whole and B's rows are cut; where it cuts columns (row-parallel), A's
    columns are cut and B is whole. The LoRA rank is never cut, so it need not divide by the world.

    Returns:
        Views ``(a_shard [r, |cols|], b_shard [|rows|, r])`` of the inputs.

    Raises:
        ValueError: if the shapes do not fit each other or the slice.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
        raise ValueError(
            f"lora_A {list(a.shape)} and lora_B {list(b.shape)} must be [r, in] and [out, r]"
        )
    if a.shape[1] < s.cols.stop:
        raise ValueError(f"lora_A {list(a.shape)} has too few columns, need {s.cols.stop}")
    if b.shape[0] < s.rows.stop:
        raise ValueError(f"lora_B {list(b.shape)} has too few rows, need {s.rows.stop}")
    return a[:, s.cols.slice], b[s.rows.slice]
