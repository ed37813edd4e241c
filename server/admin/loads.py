"""From a source to an adapter that requests may use."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from functools import partial

from server.admin.operations import Operation, Operations, OperationState, Work
from server.admin.remote import RemoteSources, in_thread
from server.admin.replies import Done, done, refusal
from server.engine_client import EngineClient
from server.errors import ApiError, InvalidRequest
from tp_engine.adapters import AdapterError
from tp_engine.adapters.names import check_name
from tp_engine.messages import AdapterReply, LoadAdapter
from tp_engine.sources import CONFIG_NAME, WEIGHTS_NAME, Claim, SourceError, SourceUrl

log = logging.getLogger(__name__)

UPLOADED = "uploaded"
"""The source of what was uploaded."""


class Loads:
    """Begins operations that load adapters."""

    def __init__(self, client: EngineClient, remote: RemoteSources | None) -> None:
        """Load through the engine; ``remote`` is None without a store to fetch to."""
        self._client = client
        self.remote = remote
        self.operations = Operations()

    def is_remote(self, source: str) -> bool:
        """Whether a source must be fetched.

        Raises:
            InvalidRequest: it is an address that is not allowed.
        """
        return self._url(source) is not None

    def begin(
        self, name: str, source: str, *, in_place: bool, sums: Mapping[str, str]
    ) -> Operation:
        """Begin to load a directory of this host or a remote source.

        Args:
            sums: SHA-256 that remote files must have, in hex, by name.

        Raises:
            ApiError: the source is not allowed, or as `Operations.begin`.
        """
        url = self._url(source)
        _check_sums(sums, url)
        name = self.free_name(name, in_place=in_place)
        if url is None:
            load = partial(self._load, path=source, source="", in_place=in_place)
            return self._begin(name, source, "verifying", load)
        fetch = partial(self._fetch_and_load, url=url, sums=sums, in_place=in_place)
        return self._begin(name, str(url), "fetching", fetch)

    def begin_uploaded(self, name: str, claim: Claim, *, in_place: bool) -> Operation:
        """Begin to load what lies in a claim, which is given up at the end."""
        load = partial(self._load_claim, claim=claim, source=UPLOADED, in_place=in_place)
        return self._begin(name, UPLOADED, "verifying", load)

    def allowed_name(self, name: str) -> str:
        """A name as it is registered.

        Raises:
            ApiError: it is not allowed, or no adapter can be loaded now.
        """
        bases = [card.name for card in self._client.require_serving().models if not card.parent]
        try:
            return check_name(name, bases)
        except AdapterError as error:
            raise refusal(error.code, str(error)) from error

    def free_name(self, name: str, *, in_place: bool) -> str:
        """As `allowed_name`; what is to be fetched or received for it would not come in vain.

        Raises:
            ApiError: also if it is loaded, or something is on its way to it.
        """
        name, served = self.allowed_name(name), self._client.require_serving().models
        if not in_place and any(card.name == name for card in served):
            text = (
                f"adapter {name!r} is loaded; replace=true replaces it (load_inplace=true in the "
                "body of /v1/load_lora_adapter)"
            )
            raise InvalidRequest(text, param="name", code="adapter_exists")
        self.operations.check_free(name)
        return name

    def _begin(self, name: str, source: str, state: OperationState, work: Work) -> Operation:
        models = self._client.require_serving().models
        replaces = any(card.name == name for card in models)
        return self.operations.begin(name, source, state, work, replaces=replaces)

    def _url(self, source: str) -> SourceUrl | None:
        if self.remote is None:
            if "://" in source:
                text = f"{source[:200]!r} is remote: start the server with --adapter-store"
                raise InvalidRequest(text, param="source", code="source_refused")
            return None
        try:
            return self.remote.allowed.find(source)
        except SourceError as error:
            raise refusal(error.code, str(error)) from error

    async def _fetch_and_load(
        self, operation: Operation, *, url: SourceUrl, sums: Mapping[str, str], in_place: bool
    ) -> Done:
        assert self.remote is not None
        try:
            claim = await self.remote.fetch(url, sums, operation.progress)
        except SourceError as error:
            raise refusal(error.code, str(error)) from error
        except OSError as error:
            text = f"{url} cannot be kept: {error}"
            raise ApiError(text, code="store_failed") from error
        seconds, count = time.time() - operation.created, operation.progress.done
        log.info(
            "adapter %r: %d bytes fetched from %s in %.1f s", operation.name, count, url, seconds
        )
        operation.state = "verifying"
        return await self._load_claim(operation, claim=claim, source=str(url), in_place=in_place)

    async def _load_claim(
        self, operation: Operation, *, claim: Claim, source: str, in_place: bool
    ) -> Done:
        keep = True  # if the engine goes before it answers, the next one need not fetch again
        try:
            reply = await self._call(operation.name, str(claim.path), source, in_place)
            keep = False
        finally:
            await in_thread(partial(claim.release, keep=keep))
        return done(reply, operation.name, "added")

    async def _load(self, operation: Operation, *, path: str, source: str, in_place: bool) -> Done:
        return done(
            await self._call(operation.name, path, source, in_place), operation.name, "added"
        )

    async def _call(self, name: str, path: str, source: str, in_place: bool) -> AdapterReply:
        call = LoadAdapter(
            call_id=uuid.uuid4().hex, name=name, path=path, source=source, in_place=in_place
        )
        reply = await self._client.call(call, patient=True)
        assert isinstance(reply, AdapterReply)
        return reply


def _check_sums(sums: Mapping[str, str], url: SourceUrl | None) -> None:
    for name, value in sums.items():
        if name not in (CONFIG_NAME, WEIGHTS_NAME):
            text = f"sha256 has {name[:100]!r}; files are {CONFIG_NAME} and {WEIGHTS_NAME}"
            raise InvalidRequest(text, param="sha256")
        if len(value) != 64 or not all(sign in "0123456789abcdefABCDEF" for sign in value):
            raise InvalidRequest(f"sha256 of {name} must be 64 hex digits", param="sha256")
    if sums and url is None:
        raise InvalidRequest("sha256 is checked for remote sources only", param="sha256")
