"""One table of ops a device: the only door through which the engine calls a kernel."""

from dataclasses import dataclass, replace
from functools import cache

import torch

from kernels.attention import PagedAttention, RotateAttend, RotateStore, StoreKV
from kernels.attention import cpu as attention_cpu
from kernels.attention import deterministic as attention_deterministic
from kernels.entry import Embed, SpellOut
from kernels.entry import reference as entry_reference
from kernels.fused import AddRMSNorm, RMSNorm, Rotary, SiluMul
from kernels.fused import cpu as fused_cpu
from kernels.lora import (
    LoraAdd,
    LoraAffine,
    LoraBeside,
    LoraExpand,
    LoraRenew,
    LoraShrink,
    LoraSiluMul,
)
from kernels.lora import cpu as lora_cpu
from kernels.lora import cpu_affine as lora_cpu_affine
from kernels.lora import deterministic as lora_deterministic
from kernels.nf4 import Dequantize, Linear, NormLinear, Prepare, QuantizeBlocks
from kernels.nf4 import cpu as nf4_cpu
from kernels.nf4 import deterministic as nf4_deterministic
from kernels.nf4.composed import norm_linear_of
from kernels.sampling import BestKeys, Draw, Greedy, LogTotal, Penalise
from kernels.sampling import cpu as sampling_cpu


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """The kernels of one device. Each field's contract is documented on its protocol."""

    prepare: Prepare
    """What is done to a weight once, at load, to make it fast."""
    linear: Linear
    """y = x W^T + bias."""
    norm_linear: NormLinear
    """`add_rms_norm`, then `linear`."""
    dequantize: Dequantize
    """NF4 shard to floating point."""
    quantize_blocks: QuantizeBlocks
    """Floating point to NF4 blocks."""
    lora_shrink: LoraShrink
    """h = x A^T of each row's own adapter."""
    lora_expand_: LoraExpand
    """y += scale * h B^T of each row's own adapter, in place."""
    lora_add_: LoraAdd
    """Both at once."""
    lora_affine_: LoraAffine
    """Gains and biases of each row's own adapter, in place."""
    store_kv: StoreKV
    """Write this step's keys and values into their pages."""
    rotate_store: RotateStore
    """Norms and rotary positions of the heads, then `store_kv`."""
    paged_attention: PagedAttention
    """Causal attention through the page table."""
    rotate_attend: RotateAttend
    """`rotate_store`, then `paged_attention`."""
    rms_norm: RMSNorm
    """Root-mean-square norm."""
    add_rms_norm: AddRMSNorm
    """Residual addition, then the norm."""
    silu_mul: SiluMul
    """silu(gate) * up."""
    rotary: Rotary
    """Rotary positions of queries and keys."""
    spell_out: SpellOut
    """The rows of a step from what its slots hold."""
    embed: Embed
    """The tokens' embeddings in a rank's part of the vocabulary."""
    greedy: Greedy
    """The best token of every row, noted in its slot."""
    best_keys: BestKeys
    """The best tokens of every row."""
    log_total: LogTotal
    """The normaliser of log-probabilities."""
    penalise: Penalise
    """Penalties for what a sequence holds already."""
    draw: Draw
    """A random token by probability."""
    lora_beside: LoraBeside | None = None
    """Both while the base product runs; None: there is no such way."""
    lora_silu_mul: LoraSiluMul | None = None
    """`silu_mul` with the deltas on both sides of it; None: there is none."""
    lora_renew: LoraRenew | None = None
    """What launches leave is forgotten; None: nothing is left."""
    most_columns: int | None = None
    """Largest vocabulary that is sampled from; None: there is no bound."""
    capturable: bool = False
    """Whether a step made of these can be captured in a CUDA graph."""


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
        return gpu_ops()
    raise ValueError(f"device must be of type 'cpu' or 'cuda', got {device.type!r}")


@cache
def gpu_ops() -> Ops:
    """The Triton kernels; imported on first use, as Triton is not there on every platform."""
    from kernels.attention import gpu as attention_gpu
    from kernels.entry import gpu as entry_gpu
    from kernels.fused import gpu as fused_gpu
    from kernels.lora import beside as lora_beside
    from kernels.lora import decode as lora_decode
    from kernels.lora import gpu as lora_gpu
    from kernels.lora import gpu_affine as lora_gpu_affine
    from kernels.lora import gpu_silu as lora_gpu_silu
    from kernels.nf4 import gpu as nf4_gpu
    from kernels.sampling import gpu as sampling_gpu

    return Ops(
        prepare=nf4_gpu.prepare,
        linear=nf4_gpu.linear,
        norm_linear=nf4_gpu.norm_linear,
        dequantize=nf4_gpu.dequantize,
        quantize_blocks=nf4_gpu.quantize_blocks,
        lora_shrink=lora_gpu.lora_shrink,
        lora_expand_=lora_gpu.lora_expand_,
        lora_add_=lora_gpu.lora_add_,
        lora_affine_=lora_gpu_affine.lora_affine_,
        store_kv=attention_gpu.store_kv,
        rotate_store=attention_gpu.rotate_store,
        paged_attention=attention_gpu.paged_attention,
        rotate_attend=attention_gpu.rotate_attend,
        rms_norm=fused_gpu.rms_norm,
        add_rms_norm=fused_gpu.add_rms_norm,
        silu_mul=fused_gpu.silu_mul,
        rotary=fused_gpu.rotary,
        spell_out=entry_gpu.spell_out,
        embed=entry_gpu.embed,
        greedy=sampling_gpu.greedy,
        best_keys=sampling_gpu.best_keys,
        log_total=sampling_gpu.log_total,
        penalise=sampling_gpu.penalise,
        draw=sampling_gpu.draw,
        lora_beside=lora_beside.lora_beside,
        lora_silu_mul=lora_gpu_silu.lora_silu_mul,
        lora_renew=lora_decode.lora_renew,
        most_columns=sampling_gpu.MOST_COLUMNS,
        capturable=True,
    )


_CPU = Ops(
    prepare=nf4_cpu.prepare,
    linear=nf4_cpu.linear,
    norm_linear=norm_linear_of(fused_cpu.add_rms_norm, nf4_cpu.linear),
    dequantize=nf4_cpu.dequantize,
    quantize_blocks=nf4_cpu.quantize_blocks,
    lora_shrink=lora_cpu.lora_shrink,
    lora_expand_=lora_cpu.lora_expand_,
    lora_add_=lora_cpu.lora_add_,
    lora_affine_=lora_cpu_affine.lora_affine_,
    store_kv=attention_cpu.store_kv,
    rotate_store=attention_cpu.rotate_store,
    paged_attention=attention_cpu.paged_attention,
    rotate_attend=attention_cpu.rotate_attend,
    rms_norm=fused_cpu.rms_norm,
    add_rms_norm=fused_cpu.add_rms_norm,
    silu_mul=fused_cpu.silu_mul,
    rotary=fused_cpu.rotary,
    spell_out=entry_reference.spell_out,
    embed=entry_reference.embed,
    greedy=sampling_cpu.greedy,
    best_keys=sampling_cpu.best_keys,
    log_total=sampling_cpu.log_total,
    penalise=sampling_cpu.penalise,
    draw=sampling_cpu.draw,
)

_DETERMINISTIC_CPU = replace(
    _CPU,
    prepare=nf4_deterministic.prepare,
    linear=nf4_deterministic.linear,
    norm_linear=norm_linear_of(fused_cpu.add_rms_norm, nf4_deterministic.linear),
    lora_shrink=lora_deterministic.lora_shrink,
    lora_expand_=lora_deterministic.lora_expand_,
    lora_add_=lora_deterministic.lora_add_,
    paged_attention=attention_deterministic.paged_attention,
    rotate_attend=attention_deterministic.rotate_attend,
)

__all__ = ["Ops", "ops_for"]
