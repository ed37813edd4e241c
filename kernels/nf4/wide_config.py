"""How a product by `wide_kernel.py` is cut up."""

from dataclasses import dataclass

SUMS = 256 * 128
"""Values of the outputs that a processor works on at a time, at most."""
TABLE = 1 << 15
"""Bytes of a table in shared memory: two values for each byte, a copy for each of 32 banks."""
_REGISTERS = 1 << 16
_SHARED = 228 << 10  # of a processor, 1 KiB of it the system's for each program
_WITHOUT_ASKING = 48 << 10
_LOADING_WARPS = 4  # one loads; registers are dealt to warps by fours


@dataclass(frozen=True, kw_only=True, slots=True)
class WideConfig:
    """The outputs of a program and the steps in which it adds them up."""

    rows: int
    """Rows of x a program: 16, 32, 64, 128 or 256."""
    tiles: int = 8
    """Tiles of 16 output features a program: 4, 8 or 16."""
    warps: int = 8
    """Warps that multiply, 4 or 8, with one tile or two each."""
    blocks: int = 1
    """Blocks of 64 columns a step, 1 or 2."""
    stages: int = 4
    """Steps in shared memory."""
    programs: int = 1
    """Programs a processor."""
    table: bool = False
    """Whether values are looked up in shared memory, not by permutations of bytes: less work for
    the pipe of the permutations, more for shared memory, which many rows need themselves."""

    def __post_init__(self) -> None:
        if self.rows not in (16, 32, 64, 128, 256):
            raise ValueError(f"rows must be 16, 32, 64, 128 or 256, got {self.rows}")
        if self.warps not in (4, 8) or self.tiles not in (self.warps, 2 * self.warps):
            raise ValueError(
                f"warps must be 4 or 8 and tiles as many or twice as many, got {self.warps} and "
                f"{self.tiles}"
            )
        if self.blocks not in (1, 2):
            raise ValueError(f"blocks must be 1 or 2, got {self.blocks}")
        if self.programs * (self.shared + 1024) > _SHARED:
            raise ValueError(
                f"stages must leave room for {self.programs} programs, got {self.stages} of "
                f"{self.shared} bytes in all"
            )
        if self.table and self.shared - TABLE <= _WITHOUT_ASKING:
            raise ValueError(
                f"stages must be more beside a table: Triton asks for the memory of both only if "
                f"the steps take more than {_WITHOUT_ASKING} bytes, got {self.shared - TABLE}"
            )
        if 16 * self.tiles * self.rows * self.programs > SUMS:
            raise ValueError(
                f"outputs must be at most {SUMS} values a processor, got {self.programs} of "
                f"{16 * self.tiles} x {self.rows}"
            )

    @property
    def shared(self) -> int:
        """Bytes of shared memory a program."""
        step = 128 * self.blocks * self.rows + (512 * self.blocks + 64) * self.tiles + 16
        fixed = 32 * self.tiles * self.rows + 256  # an output, and what Triton keeps of the warps
        return self.stages * step + fixed + (TABLE if self.table else 0)

    @property
    def registers(self) -> int | None:
        """Registers a thread at the start of a program; None leaves one program all of them."""
        threads = 32 * (self.warps + _LOADING_WARPS)
        return None if self.programs == 1 else _REGISTERS // self.programs // threads // 8 * 8


__all__ = ["SUMS", "TABLE", "WideConfig"]
