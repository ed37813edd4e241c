"""Checks of the model's directory: everything that is read later is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.preflight.errors import PreflightError

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_LFS_POINTER = b"version https://git-lfs"


def check_model_directory(directory: Path, *, weights: bool = True) -> None:
    """Check that config, tokenizer and every safetensors file are there and are real files.

    Args:
        directory: of the model.
        weights: whether weights are read from it; random ones need no files.

    Raises:
        PreflightError: naming the directory and what is missing.
    """
    if not directory.is_dir():
        raise PreflightError(f"model path {directory} is not a directory: give the folder itself")
    if not (directory / "config.json").is_file():
        raise PreflightError(
            f"{directory} has no config.json: it is no model directory as transformers saves it"
        )
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        raise PreflightError(
            f"{directory} has no tokenizer (none of {', '.join(_TOKENIZERS)}): copy the base "
            f"model's tokenizer files there"
        )
    for path in _weight_files(directory) if weights else ():
        _check_weight_file(path)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _indexed(index)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = sorted(
            path.name
            for suffix in ("bin", "pt", "pth", "gguf")
            for path in directory.glob(f"*.{suffix}")
        )
        found = f"only {', '.join(others[:3])}" if others else "no weights at all"
        raise PreflightError(
            f"{directory} has no *.safetensors, {found}: convert the model with save_pretrained "
            f"of transformers (pickled weights are never read)"
        )
    return files


def _indexed(index: Path) -> list[Path]:
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        return [index.parent / name for name in sorted(set(content["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PreflightError(f"{index} is not an index of safetensors files: {error!r}") from error


def _check_weight_file(path: Path) -> None:
    if not path.is_file():
        raise PreflightError(
            f"{path} is listed in the index but is not there: the download or copy is incomplete"
        )
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise PreflightError(
                f"{path} is a git-lfs pointer, not weights: run `git lfs pull` in {path.parent}"
            )
