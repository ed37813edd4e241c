"""Where the base model's files are: a local directory, or a snapshot of the Hugging Face Hub.

What looks like a path is never asked for on the Hub, and one rank downloads for all.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tp_engine.config import EngineConfig

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
# Folders hold other formats of the same weights, as does Mistral's consolidated file.
_UNWANTED = ["*/*", "consolidated*.safetensors"]


class ModelNotFound(ValueError):
    """The base model's files can't be had; says why and what to do."""


def is_local(model: str) -> bool:
    """Whether ``model`` means a directory: it exists, or can't be read as a Hub id."""
    return os.path.exists(os.path.expanduser(model)) or _HUB_ID.fullmatch(model) is None


def download_model(config: EngineConfig) -> Path:
    """The model's directory, fetched from the Hub when it isn't on this host.

    Call it on one rank; the others call `local_model` once it has returned.

    Raises:
        ModelNotFound: no such directory or Hub model, no right to it, or no way to reach it.
    """
    return _locate(config, download=not offline())


def local_model(config: EngineConfig) -> Path:
    """The model's directory on this host, without using the network.

    Raises:
        ModelNotFound: it is not here.
    """
    return _locate(config, download=False)


def offline() -> bool:
    """Whether the user has forbidden the Hub's client to use the network (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _locate(config: EngineConfig, *, download: bool) -> Path:
    model, revision = config.model, config.revision
    if not is_local(model):
        return _snapshot(model, revision, download=download)
    if revision is not None:
        raise ModelNotFound(
            f"revision={revision!r} is for Hub models, but model={model!r} is a path: leave the "
            f"revision out"
        )
    path = Path(os.path.expanduser(model)).absolute()
    if not path.exists():
        raise ModelNotFound(
            f"model directory {path} does not exist: check the path (a Hub id looks like ORG/NAME)"
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
        raise ModelNotFound(_hub_trouble(model, revision, error, download=download)) from error
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
            f"no Hub model {model} can be seen, nor is there a directory of that name: check the "
            f"model option, or set HF_TOKEN if the model is private"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"Hub model {model} has no revision {revision!r}"
    if not isinstance(error, LocalEntryNotFoundError):
        return f"Hub model {model} can't be fetched: {error}"
    absent = f"there is no directory {model}, and Hub model {model} is not (wholly) in the cache"
    if offline():
        return f"HF_HUB_OFFLINE is set, {absent}: unset it, or give a local directory"
    if not download:
        return f"{absent} of this host: download it here, or let all ranks share one HF_HOME"
    return (
        f"the Hub can't be reached ({error.__cause__}), {absent}: check the network, or give a "
        f"local directory"
    )
