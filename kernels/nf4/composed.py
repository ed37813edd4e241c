"""`NormLinear` of the ops that it is made of."""

from torch import Tensor

from kernels.fused import AddRMSNorm
from kernels.nf4 import Linear, NormLinear, Weight


def norm_linear_of(add_rms_norm: AddRMSNorm, linear: Linear) -> NormLinear:
    """Return the composition."""

    def norm_linear(
        x: Tensor,
        residual: Tensor,
        norm: Tensor,
        eps: float,
        w: Weight,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        normed, total = add_rms_norm(x, residual, norm, eps)
        return linear(normed, w, bias), total

    return norm_linear


__all__ = ["norm_linear_of"]
