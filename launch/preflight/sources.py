"""Check of where adapters may be fetched from: that it can be done at all."""

from __future__ import annotations

import importlib.util

from launch.options import ServeConfig
from launch.preflight.errors import PreflightError
from tp_engine.sources import AllowedSources


def check_sources(config: ServeConfig) -> None:
    """Check that there is a place for what is fetched, and a package for each kind of source.

    Raises:
        PreflightError: something is missing.
    """
    prefixes = AllowedSources(config.adapter_source).prefixes
    if prefixes and config.adapter_store is None:
        raise PreflightError(
            "--adapter-source needs --adapter-store: a directory for what is fetched"
        )
    if any(prefix.scheme == "s3" for prefix in prefixes) and not importlib.util.find_spec("s3fs"):
        raise PreflightError(
            "--adapter-source has an s3:// prefix, but s3fs is not installed: run "
            "`pip install -e '.[s3]'` in the checkout"
        )
