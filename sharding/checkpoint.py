"""A model directory of safetensors files, read lazily."""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch

from sharding.header import CheckpointError
from sharding.stored import MappedFile, StoredTensor
from sharding.units import Span

__all__ = ["Checkpoint"]

_SINGLE: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
_MAX_INDEX_BYTES: Final = 16 << 20
_PICKLED: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint:
    """Tensors of a model by name, whichever file they are in.

    Keeps account of the names that were read, so that a loader can refuse leftovers. Use it as a
    context manager; tensors already read stay valid after it is closed.
    """

    def __init__(self, directory: Path, files: list[MappedFile]) -> None:
        """Use `open`; ``files`` are open and their names distinct."""
        self.directory = directory
        self._files = files
        self._owners = {name: file for file in files for name in file}
        self._read: set[str] = set()

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> "Checkpoint":
        """Open ``model.safetensors``, or else the files of ``model.safetensors.index.json``.

        Raises:
            CheckpointError: naming file and reason, if anything is missing or corrupt. Pickled
                weights are refused; nothing in them is run.
        """
        root = Path(directory)
        names, expected = _list_files(root)
        files: list[MappedFile] = []
        try:
            for name in names:
                files.append(MappedFile(root / name))
            _check_names(root, files, expected)
        except BaseException:
            for file in files:
                file.close()
            raise
        return cls(root, files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all files."""
        for file in self._files:
            file.close()

    @property
    def names(self) -> tuple[str, ...]:
        """All tensor names, in file order."""
        return tuple(self._owners)

    @property
    def unread(self) -> tuple[str, ...]:
        """Names that nobody has asked to read, in file order."""
        return tuple(name for name in self._owners if name not in self._read)

    def __contains__(self, name: object) -> bool:
        return name in self._owners

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as stored (the packed one for NF4 weights); does not count as reading."""
        return self._owner(name).infos[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Element type as stored; does not count as reading."""
        return self._owner(name).infos[name].dtype

    def stored(self, name: str) -> StoredTensor:
        """Handle for partial reads; counts as reading, even if the part turns out to be empty."""
        file = self._owner(name)
        self._read.add(name)
        return StoredTensor(name, file.infos[name], file)

    def read(self, name: str) -> torch.Tensor:
        """The whole tensor."""
        return self.stored(name).read()

    def read_slice(self, name: str, rows: Span, cols: Span | None = None) -> torch.Tensor:
        """Part of a tensor; see `StoredTensor.read_slice`."""
        return self.stored(name).read_slice(rows, cols)

    def _owner(self, name: str) -> MappedFile:
        """File that holds ``name``."""
        try:
            return self._owners[name]
        except KeyError:
            raise CheckpointError(f"{self.directory}: no tensor named {name!r}") from None


def _list_files(root: Path) -> tuple[list[str], set[str]]:
    """File names to open, in order, and the tensor names that the index promises."""
    if not root.is_dir():
        raise CheckpointError(f"{root}: no such directory")
    if (root / _SINGLE).is_file():
        return [_SINGLE], set()
    if (root / _INDEX).is_file():
        weight_map = _read_index(root / _INDEX)
        return sorted(set(weight_map.values())), set(weight_map)
    pickled = sorted(p.name for p in root.iterdir() if p.suffix in _PICKLED)
    if pickled:
        raise CheckpointError(
            f"{root}: only pickled weights ({pickled[0]}), which could run code when read; "
            "convert them to safetensors"
        )
    raise CheckpointError(f"{root}: neither {_SINGLE} nor {_INDEX}")


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name; every file a plain name, so that it stays in the directory."""
    size = path.stat().st_size
    if size > _MAX_INDEX_BYTES:
        raise CheckpointError(f"{path}: {size} bytes exceed the limit of {_MAX_INDEX_BYTES}")
    try:
        parsed = json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not UTF-8 JSON: {error}") from None
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or empty")
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or set(file) & set("/\\\0")
        ):
            raise CheckpointError(
                f"{path}: weight_map[{name[:200]!r}] is {str(file)[:200]!r}, need the plain name "
                "of a .safetensors file in the same directory"
            )
    return weight_map


def _check_names(root: Path, files: list[MappedFile], expected: set[str]) -> None:
    """Every promised tensor exists, and none twice."""
    seen: dict[str, Path] = {}
    for file in files:
        for name in file:
            if name in seen:
                raise CheckpointError(f"{file.path}: tensor {name!r} is also in {seen[name]}")
            seen[name] = file.path
    missing = sorted(expected - set(seen))
    if missing:
        raise CheckpointError(
            f"{root / _INDEX}: {len(missing)} tensors are in no file, first {missing[0]!r}"
        )
