"""The NF4 shard as the GPU kernels read it: a permutation of the canonical one, made at load.

Tiles of 16 rows by one block of 64 columns, 512 bytes each: what the 32 lanes of a warp hold as the
left operand of the tensor cores, 16 bytes a lane, so that a tile is one wide load and no value
changes lanes after it. Lane 4 g + q, word o, nibble 4 h + 2 r + b hold

    row 8 r + g, column 16 o + 8 h + 2 q + b   of the tile.

Rows are padded to a multiple of 128 and columns to one of 256, with the code of zero and absmax 0.
The float32 absmax is kept in two planes of 16 bits: `scales`, its nearest bfloat16, is all that the
products read; `rest`, the difference of the bit patterns, makes it whole again.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.nf4 import DenseWeight, NF4Weight, Weight
from kernels.nf4.codebook import ORDER, RENUMBERED, ZERO
from kernels.nf4.packed_weight import BLOCK, PackedNF4

ROWS = 128
"""Rows are padded to a multiple."""
COLUMNS = 256
"""Columns are padded to a multiple."""
_TILE = 16


def can_pack(w: NF4Weight) -> bool:
    """Say whether each row's blocks begin at its first element and are made of whole 64s."""
    return w.blocksize % BLOCK == 0 and not bool(w.phase.any())


def pack(w: NF4Weight) -> PackedNF4:
    """Return the packed form, on the same device. Raises ValueError unless `can_pack`."""
    if not can_pack(w):
        raise ValueError(
            f"w must have phase 0 everywhere and a blocksize that is a multiple of {BLOCK} to be "
            f"packed, got blocksize {w.blocksize}"
        )
    rows, columns = w.shape
    nibbles = torch.stack((w.codes >> 4, w.codes & 15), dim=-1).flatten(1)[:, :columns]
    table = torch.tensor(RENUMBERED, dtype=torch.uint8, device=w.codes.device)
    codes = pad(
        table[nibbles.int()], (0, -columns % COLUMNS, 0, -rows % ROWS), value=ZERO
    )  # [P, 64 B]
    scales, rest = _split_absmax(_absmax_by_64(w))
    return PackedNF4(words=_to_words(codes), scales=scales, rest=rest, rows=rows, columns=columns)


def unpack(packed: PackedNF4, blocksize: int = BLOCK) -> NF4Weight:
    """Return the canonical shard, bit for bit, with phase 0 and absmax [N, ceil(K / blocksize)]."""
    rows, columns = packed.shape
    table = torch.tensor(ORDER, dtype=torch.uint8, device=packed.words.device)
    codes = table[_from_words(packed.words).int()][:rows, :columns]
    codes = pad(codes, (0, columns % 2))
    every = blocksize // BLOCK
    absmax = join_absmax(packed)[:rows, : -(-columns // BLOCK) : every]
    return NF4Weight(
        codes=(codes[:, ::2] << 4) | codes[:, 1::2],
        absmax=absmax.contiguous(),
        phase=torch.zeros(rows, dtype=torch.int32, device=codes.device),
        columns=columns,
        blocksize=blocksize,
    )


def canonical(w: Weight) -> DenseWeight | NF4Weight:
    """Return the weight itself, or the canonical shard of a packed one."""
    return unpack(w) if isinstance(w, PackedNF4) else w


def tiles_of(packed: PackedNF4, start: int, stop: int) -> PackedNF4:
    """Return views of the tiles that hold rows start .. stop, from row start - start % 16 on."""
    first, end = start // _TILE, -(-stop // _TILE)
    rows = slice(first * _TILE, end * _TILE)
    return PackedNF4(
        words=packed.words[first:end],
        scales=packed.scales[:, rows],
        rest=packed.rest[:, rows],
        rows=min(packed.rows, end * _TILE) - first * _TILE,
        columns=packed.columns,
    )


def find_code(packed: PackedNF4, row: int, column: int) -> tuple[int, int]:
    """Return (number of the word in `words`, number of its nibble) of a code."""
    tile, (r, g) = row // _TILE, divmod(row % _TILE, 8)
    block, within = divmod(column, BLOCK)
    o, h, q, b = within // 16, within // 8 % 2, within // 2 % 4, within % 2
    lane = 4 * g + q
    return (tile * packed.blocks + block) * 128 + 4 * lane + o, 4 * h + 2 * r + b


def find_absmax(packed: PackedNF4, row: int, block: int) -> tuple[int, int]:
    """Return (number of the word in `scales` and `rest`, number of its half) of an absmax."""
    tile, (r, g) = row // _TILE, divmod(row % _TILE, 8)
    pair, half = divmod(block, 2)
    return pair * packed.scales.shape[1] + tile * _TILE + 2 * g + r, half


def join_absmax(packed: PackedNF4) -> Tensor:
    """Return float32 [P, B]."""
    high, low = _unpair(packed.scales), _unpair(packed.rest)
    low = torch.where(low >= 1 << 15, low - (1 << 16), low)
    return _signed(((high << 16) + low) & 0xFFFFFFFF).view(torch.float32).T.contiguous()


def _absmax_by_64(w: NF4Weight) -> Tensor:
    """Return float32 [P, B], zero in the padding."""
    rows, columns = w.shape
    blocks = -(-columns // BLOCK)
    used = w.absmax[:, : -(-columns // w.blocksize)]
    spread = used.repeat_interleave(w.blocksize // BLOCK, dim=1)[:, :blocks]
    return pad(spread, (0, -blocks % (COLUMNS // BLOCK), 0, -rows % ROWS))


def _split_absmax(absmax: Tensor) -> tuple[Tensor, Tensor]:
    bits = absmax.contiguous().view(torch.int32).long()  # [P, B]
    high = (bits + 0x8000) >> 16  # a tie goes up, or the difference below would need 17 bits
    low = bits - (high << 16)
    return _pair(high & 0xFFFF), _pair(low & 0xFFFF)


def _pair(halves: Tensor) -> Tensor:
    """[P, B] of 16-bit numbers -> int32 [B / 2, P]."""
    both = halves[:, ::2] | (halves[:, 1::2] << 16)
    pairs, rows = both.shape[1], both.shape[0]
    apart = _signed(both).T.reshape(pairs, rows // 16, 2, 8)
    return apart.transpose(2, 3).reshape(pairs, rows)  # [B / 2, P / 16, g, r]


def _unpair(pairs: Tensor) -> Tensor:
    """int32 [B / 2, P] -> int64 [B, P] of 16-bit numbers."""
    apart = pairs.reshape(pairs.shape[0], -1, 8, 2)
    whole = apart.transpose(2, 3).reshape(pairs.shape).long() & 0xFFFFFFFF
    return torch.stack((whole & 0xFFFF, whole >> 16), dim=1).flatten(0, 1)


def _to_words(codes: Tensor) -> Tensor:
    rows, columns = codes.shape
    tiles = codes.view(rows // _TILE, 2, 8, columns // BLOCK, 4, 2, 4, 2)  # T r g B o h q b
    ordered = tiles.permute(0, 3, 2, 6, 4, 5, 1, 7).reshape(-1, 8)  # T B g q o, h r b
    whole = torch.zeros(ordered.shape[0], dtype=torch.int64, device=codes.device)
    for nibble in range(8):
        whole |= ordered[:, nibble].long() << (4 * nibble)
    return _signed(whole).view(rows // _TILE, columns // BLOCK * 128)


def _from_words(words: Tensor) -> Tensor:
    tiles, width = words.shape
    shifts = torch.arange(0, 32, 4, device=words.device)
    nibbles = (words.long()[..., None] >> shifts) & 15
    ordered = nibbles.view(tiles, width // 128, 8, 4, 4, 2, 2, 2)  # T B g q o h r b
    return ordered.permute(0, 6, 2, 1, 4, 5, 3, 7).reshape(tiles * _TILE, -1).to(torch.uint8)


def _signed(whole: Tensor) -> Tensor:
    """Reinterpret 32-bit numbers held in int64."""
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


__all__ = [
    *("COLUMNS", "ROWS", "can_pack", "canonical", "find_absmax", "find_code", "join_absmax"),
    *("pack", "tiles_of", "unpack"),
]
