"""One table of ops a device: the only door through which the engine calls a kernel."""

from dataclasses import dataclass

import torch

import kernels.attention.reference
import kernels.fused.reference
import kernels.lora.reference
import kernels.nf4.reference
from kernels.attention import PagedAttention, StoreKV
from kernels.fused import AddRMSNorm, RMSNorm, Rotary, SiluMul
from kernels.lora import LoraExpand, LoraShrink
from kernels.nf4 import Dequantize, Linear, QuantizeBlocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """The kernels of one device. Each field's contract is documented on its protocol."""

    linear: Linear
    """y = x W^T + bias."""
    dequantize: Dequantize
    """NF4 shard to floating point."""
    quantize_blocks: QuantizeBlocks
    """Floating point to NF4 blocks."""
    lora_shrink: LoraShrink
    """h = x A^T of each row's own adapter."""
    lora_expand_: LoraExpand
    """y += scale * h B^T of each row's own adapter, in place."""
    store_kv: StoreKV
    """Write this step's keys and values into their pages."""
    paged_attention: PagedAttention
    """Causal attention through the page table."""
    rms_norm: RMSNorm
    """Root-mean-square norm."""
    add_rms_norm: AddRMSNorm
    """Residual addition, then the norm."""
    silu_mul: SiluMul
    """silu(gate) * up."""
    rotary: Rotary
    """Rotary positions of queries and keys."""


def ops_for(device: torch.device, *, deterministic: bool = False) -> Ops:
    """Return the ops of a device.

    With `deterministic`, a row's result doesn't depend on what else is in the step: not on the
    number of rows, its place, other rows, the split of a prompt into chunks, or page placement.
    Raises ValueError for a device type without ops, or when it has no deterministic ones.
    """
    if device.type == "cpu":
        return _DETERMINISTIC_CPU if deterministic else _CPU
    if device.type == "cuda":
        if deterministic:
            raise ValueError(
                "deterministic=True is not available on device type 'cuda'; allowed: 'cpu'"
            )
        return _REFERENCE
    raise ValueError(f"device must be of type 'cpu' or 'cuda', got {device.type!r}")


_REFERENCE = Ops(
    linear=kernels.nf4.reference.linear,
    dequantize=kernels.nf4.reference.dequantize,
    quantize_blocks=kernels.nf4.reference.quantize_blocks,
    lora_shrink=kernels.lora.reference.lora_shrink,
    lora_expand_=kernels.lora.reference.lora_expand_,
    store_kv=kernels.attention.reference.store_kv,
    paged_attention=kernels.attention.reference.paged_attention,
    rms_norm=kernels.fused.reference.rms_norm,
    add_rms_norm=kernels.fused.reference.add_rms_norm,
    silu_mul=kernels.fused.reference.silu_mul,
    rotary=kernels.fused.reference.rotary,
)
_CPU = _REFERENCE
_DETERMINISTIC_CPU = _REFERENCE

__all__ = ["Ops", "ops_for"]
