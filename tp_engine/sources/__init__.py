"""Adapters that come from elsewhere: S3, HTTPS, the Hugging Face Hub.

`urls` says what may be asked for, `source` what every kind of source can do (`http`, `s3`, `hub`),
`fetch` brings files to the disk, `area` and `partial` keep what is there in part.

Nothing here is called because a request or an adapter's config names it: only an operator's call
is. Nothing here needs torch: the HTTP front end fetches, so that the engine's process does not.
"""

from tp_engine.sources.area import Claim, FetchArea, claims_directory
from tp_engine.sources.errors import FetchCancelled, SourceError
from tp_engine.sources.fetch import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    WEIGHTS_NAME,
    FetchLimits,
    FetchProgress,
    fetch,
)
from tp_engine.sources.head import HeadCheck
from tp_engine.sources.source import open_source
from tp_engine.sources.urls import AllowedSources, SourceUrl

__all__ = [
    "CONFIG_NAME",
    "MAX_CONFIG_BYTES",
    "WEIGHTS_NAME",
    "AllowedSources",
    "Claim",
    "FetchArea",
    "FetchCancelled",
    "FetchLimits",
    "FetchProgress",
    "HeadCheck",
    "SourceError",
    "SourceUrl",
    "claims_directory",
    "fetch",
    "open_source",
]
