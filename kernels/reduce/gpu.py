"""Sums and exchanges over the ranks of one host on CUDA: one launch a rank.

Every rank must make the same calls, with the same shapes, in the same order and on one stream. A
launch waits on the device, without a time limit, for those of the other ranks.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from kernels.checks import check_norm, reject
from kernels.reduce import SHARE_PIECE, Mailboxes
from kernels.reduce.gpu_kernels import share_stamped, sum_signalled, sum_stamped

_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def sum_over_ranks(x: Tensor, boxes: Mailboxes) -> Tensor:
    """The sum of ``x`` over the ranks, in rank order, in float32 and rounded once; equal bits on
    all ranks.

    Args:
        x: float32, bfloat16 or float16 [T, D]; left as it is.
        boxes: of this rank.

    Raises:
        ValueError: ``x`` has another dtype, or the mailboxes do not `hold_rows` of it.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    _sum(x, x, x, out, out, 0.0, boxes, norm=False)
    return out


def sum_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, boxes: Mailboxes
) -> tuple[Tensor, Tensor]:
    """`kernels.fused.AddRMSNorm` of the sum of ``x`` over the ranks, as `sum_over_ranks` gives it.

    Args:
        x, residual: [T, D]; the residual is equal on all ranks.
        weight: [D].
        boxes: of this rank.

    Raises:
        ValueError: another shape, dtypes that differ, or the mailboxes do not `hold_rows` of x.
    """
    check_norm(x, weight, residual)
    if weight.dtype != x.dtype:
        reject("weight", f"{x.dtype} as x", weight)
    x = x.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    _sum(x, residual.contiguous(), weight.contiguous(), out, total, eps, boxes, norm=True)
    return out, total


def share_with_ranks(x: Tensor, boxes: Mailboxes) -> Tensor:
    """Every rank's ``x``, in rank order: [N, *shape].

    Raises:
        ValueError: the mailboxes do not `share` it.
    """
    if not boxes.share(x):
        reject("x", "short and of whole words", x)
    x = x.contiguous()
    out = x.new_empty((len(boxes.shared.by_rank), *x.shape))
    if words := x.numel() * x.element_size() // 4:
        share_stamped[(-(-words // SHARE_PIECE),)](
            _as_words(x), _as_words(out), boxes.shared.by_rank, boxes.shared.uses, words,
            BLOCK=SHARE_PIECE, num_warps=4, **_ranks(boxes),
        )  # fmt: skip
    return out


def _sum(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float,
    boxes: Mailboxes, *, norm: bool,
) -> None:  # fmt: skip
    if x.dtype not in _DTYPES or not boxes.hold_rows(x):
        reject("x", "float32, bfloat16 or float16 rows that the mailboxes hold", x)
    rows = x.shape[0]
    if not rows:
        return
    words = x.shape[1] * x.element_size() // 4
    tensors = [_as_words(each) for each in (x, residual, weight, out, total)]
    options: dict[str, Any] = {
        **_ranks(boxes),
        "DTYPE": _DTYPES[x.dtype],
        "BLOCK": boxes.row_words,
        "NORM": norm,
        "num_warps": max(1, min(16, boxes.row_words // 256)),
    }
    if rows <= boxes.few.uses.shape[0]:
        few = boxes.few
        sum_stamped[(rows,)](*tensors, few.by_rank, few.uses, words, eps, **options)
    else:
        many = boxes.many
        sum_signalled[(rows,)](
            *tensors, many.by_rank, many.signals, many.uses, words, eps, **options
        )


def _as_words(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.int32)


def _ranks(boxes: Mailboxes) -> dict[str, Any]:
    return {"RANK": boxes.rank, "WORLD": len(boxes.shared.by_rank)}


__all__ = ["share_with_ranks", "sum_add_rms_norm", "sum_over_ranks"]
