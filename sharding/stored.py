"""An open safetensors file, and handles to the tensors in it.

Every read copies bytes and then views them as the stored dtype: no value passes through a float
conversion, and no tensor handed out depends on the file's life.
"""

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sharding.header import CheckpointError, TensorInfo, Walk, parse_header
from sharding.units import Span

__all__ = ["MappedFile", "StoredTensor"]


class MappedFile:
    """One safetensors file; the header that was checked and the bytes read are of one open file."""

    def __init__(self, path: Path, walk: Walk = iter) -> None:
        """Open, check and map ``path``; ``walk`` goes over its entries.

        Raises:
            CheckpointError: as `sharding.header.read_header`.
        """
        self.path = path
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file")
        self._file = path.open("rb")
        try:
            self.infos = parse_header(self._file, path, walk)
            # Read-only: a writable private map of a large file counts as memory to be backed.
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except BaseException:
            self._file.close()
            raise

    def __iter__(self) -> Iterator[str]:
        """Names of the file's tensors."""
        return iter(self.infos)

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Copy of the file's bytes ``begin:end``, uint8.

        Not by way of the map: to unmap what was touched takes milliseconds in which no other
        thread of Python runs, and where a file was cut short meanwhile, touching ends the process.

        Raises:
            CheckpointError: the file was cut short since it was opened.
        """
        tensor = torch.empty(end - begin, dtype=torch.uint8)
        rest = tensor.numpy().data
        while rest:
            count = os.preadv(self._file.fileno(), [rest], end - len(rest))
            if not count:
                raise CheckpointError(f"{self.path}: was cut short while it was read")
            rest = rest[count:]
        return tensor

    def view(self, begin: int, end: int) -> npt.NDArray[np.uint8]:
        """Read-only view of the file's bytes ``begin:end``; to be dropped before `close`."""
        if self._map.closed:
            raise ValueError(f"{self.path}: read after the checkpoint was closed")
        return np.frombuffer(self._map, dtype=np.uint8, count=end - begin, offset=begin)

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()
        self._file.close()


class StoredTensor:
    """A tensor in a file, read as a whole or in part."""

    def __init__(self, name: str, info: TensorInfo, file: MappedFile) -> None:
        self._name = name
        self.info = info
        self._file = file

    @property
    def name(self) -> str:
        """Name in the checkpoint."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape as stored."""
        return self.info.shape

    @property
    def dtype(self) -> torch.dtype:
        """Element type as stored."""
        return self.info.dtype

    def read(self) -> torch.Tensor:
        """The whole tensor, in memory of its own."""
        raw = self.read_bytes(0, self.info.nbytes)
        return raw.view(self.dtype).view(self.shape)

    def read_bytes(self, start: int, stop: int) -> torch.Tensor:
        """Bytes ``start:stop`` of the data (uint8), in memory of their own."""
        if not 0 <= start <= stop <= self.info.nbytes:
            raise ValueError(f"{self.name}: bytes {start}:{stop} of {self.info.nbytes}")
        return self._file.read(self.info.begin + start, self.info.begin + stop)

    def read_slice(self, rows: Span, cols: Span | None = None) -> torch.Tensor:
        """Rows (first dimension), and columns of a matrix, in memory of their own.

        Only the pages of the file that hold the slice are touched.

        Raises:
            ValueError: if the tensor has no rows, or is no matrix where ``cols`` is given, or the
                spans leave it.
        """
        dims = len(self.shape)
        if dims < 1 or rows.stop > self.shape[0]:
            raise ValueError(f"{self.name}: rows {rows.start}:{rows.stop} of {list(self.shape)}")
        row_bytes = self.info.nbytes // self.shape[0] if self.shape[0] else 0
        start, stop = rows.start * row_bytes, rows.stop * row_bytes
        if cols is None:
            return self.read_bytes(start, stop).view(self.dtype).view(-1, *self.shape[1:])
        if dims != 2 or cols.stop > self.shape[1]:
            raise ValueError(f"{self.name}: cols {cols.start}:{cols.stop} of {list(self.shape)}")
        if not rows.size or not cols.size:
            return torch.empty(rows.size, cols.size, dtype=self.dtype)
        raw = self._file.view(self.info.begin + start, self.info.begin + stop)
        width = self.dtype.itemsize
        part = raw.reshape(rows.size, row_bytes)[:, cols.start * width : cols.stop * width]
        tensor = torch.empty(part.shape, dtype=torch.uint8)
        np.copyto(tensor.numpy(), part)  # torch itself warns about views of read-only memory
        return tensor.view(self.dtype)
