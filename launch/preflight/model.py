"""Finding the model and checking that its directory is complete, before a weight is read."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from launch.preflight.errors import PreflightError

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
# Folders hold other formats of the same weights, as does Mistral's consolidated file.
_UNWANTED = ["*/*", "consolidated*.safetensors"]
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_LFS_POINTER = b"version https://git-lfs"


def is_local(model: str) -> bool:
    """Whether ``model`` means a directory: it exists, or can't be read as a Hub id."""
    return os.path.exists(os.path.expanduser(model)) or _HUB_ID.fullmatch(model) is None


def fetch_model(model: str, revision: str | None) -> Path:
    """The model's directory, downloaded from the Hub when it isn't here.

    Call it on one rank of a host (``LOCAL_RANK`` 0); the others call `find_model` afterwards.

    Raises:
        PreflightError: no such directory or Hub model, no right to it, or no way to reach it.
    """
    return _locate(model, revision, download=not offline())


def find_model(model: str, revision: str | None) -> Path:
    """The model's directory on this host, without using the network.

    Raises:
        PreflightError: it is not here.
    """
    return _locate(model, revision, download=False)


def offline() -> bool:
    """Whether the user has forbidden the Hub's client to use the network (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _locate(model: str, revision: str | None, *, download: bool) -> Path:
    if not is_local(model):
        return _snapshot(model, revision, download=download)
    if revision is not None:
        raise PreflightError(
            f"--revision {revision} is for Hub models, but --model {model} is a path: leave "
            f"--revision out"
        )
    path = Path(os.path.expanduser(model)).absolute()
    if not path.exists():
        raise PreflightError(
            f"model directory {path} does not exist: check --model (a Hub id looks like ORG/NAME)"
        )
    return path


def _snapshot(model: str, revision: str | None, *, download: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model,
            revision=revision,
            allow_patterns=_WANTED,
            ignore_patterns=_UNWANTED,
            local_files_only=not download,
        )
    except Exception as error:  # what its network library raises differs by version
        raise PreflightError(_hub_trouble(model, revision, error, download=download)) from error
    return Path(found)


def _hub_trouble(model: str, revision: str | None, error: Exception, *, download: bool) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return (
            f"Hub model {model} is gated: accept its terms at https://huggingface.co/{model} and "
            f"set HF_TOKEN to a token of that account"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"no Hub model {model} can be seen, nor is there a directory of that name: check "
            f"--model, or set HF_TOKEN if the model is private"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"Hub model {model} has no revision {revision}: check --revision"
    if not isinstance(error, LocalEntryNotFoundError):
        return f"Hub model {model} can't be fetched: {error}"
    absent = f"there is no directory {model}, and Hub model {model} is not (wholly) in the cache"
    if offline():
        return f"HF_HUB_OFFLINE is set, {absent}: unset it, or give a local directory as --model"
    if not download:
        return f"{absent} of this host: fetch it first, and let all ranks here share HF_HOME"
    return (
        f"the Hub can't be reached ({error.__cause__}), {absent}: check the network, or give a "
        f"local directory as --model"
    )


def check_model_directory(directory: Path) -> None:
    """Check that config, tokenizer and every safetensors file are there and are real files.

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
    for path in _weight_files(directory):
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
