"""The reference ops, and how far from them each dtype may be."""

import torch
from torch import Tensor

from kernels.attention import reference as attention
from kernels.dispatch import Ops
from kernels.entry import reference as entry
from kernels.fused import reference as fused
from kernels.lora import reference as lora
from kernels.nf4 import reference as nf4
from kernels.nf4.composed import norm_linear_of
from kernels.sampling import reference as sampling

REFERENCE = Ops(
    prepare=nf4.prepare,
    linear=nf4.linear,
    norm_linear=norm_linear_of(fused.add_rms_norm, nf4.linear),
    dequantize=nf4.dequantize,
    quantize_blocks=nf4.quantize_blocks,
    lora_shrink=lora.lora_shrink,
    lora_expand_=lora.lora_expand_,
    lora_add_=lora.lora_add_,
    lora_affine_=lora.lora_affine_,
    store_kv=attention.store_kv,
    rotate_store=attention.rotate_store,
    paged_attention=attention.paged_attention,
    rotate_attend=attention.rotate_attend,
    rms_norm=fused.rms_norm,
    add_rms_norm=fused.add_rms_norm,
    silu_mul=fused.silu_mul,
    rotary=fused.rotary,
    spell_out=entry.spell_out,
    embed=entry.embed,
    greedy=sampling.greedy,
    best_keys=sampling.best_keys,
    log_total=sampling.log_total,
    penalise=sampling.penalise,
    draw=sampling.draw,
)

# (relative, absolute as a share of the largest expected value). The 16-bit rows allow two
# roundings, since a sum in another order may round the other way.
TOLERANCE = {
    torch.float32: (2e-6, 2e-6),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Compare by the table, with the dtype and the shape; NaN is never near."""
    relative, absolute = TOLERANCE[expected.dtype]
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute * max(scale, 1e-30))


def bits(tensor: Tensor) -> bytes:
    """The exact content; NaN equals itself, -0.0 differs from 0.0."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
