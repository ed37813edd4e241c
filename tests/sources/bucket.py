"""An S3 server of this process with one empty bucket."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import s3fs
from moto.server import ThreadedMotoServer


@contextmanager
def empty_bucket() -> Iterator[s3fs.S3FileSystem]:
    """``s3://bucket``; meanwhile the environment leads to it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    environment = {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        # All servers of a process have the same buckets, those of earlier tests too.
        httpx.post(f"{address}/moto-api/reset").raise_for_status()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            s3fs.S3FileSystem.clear_instance_cache()
            files = s3fs.S3FileSystem(use_listings_cache=False)
            files.mkdir("bucket")
            yield files
    finally:
        server.stop()
