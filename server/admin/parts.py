"""The two files of an adapter in a multipart body, written as they come.

Each part's name, or its file name, is that of one of the files. Format: RFC 7578.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from server.errors import BodyTooLarge, InvalidRequest
from tp_engine.sources import CONFIG_NAME, MAX_CONFIG_BYTES, WEIGHTS_NAME, HeadCheck, SourceError


class Parts:
    """Takes a body apart as it comes."""

    def __init__(self, directory: Path, content_type: str, length: int | None) -> None:
        """Write into ``directory``; ``length`` is the whole body's, if known.

        Raises:
            InvalidRequest: it is no multipart body.
        """
        # Not at the top: the engine's own hosts need not have it.
        from python_multipart.multipart import MultipartParser, parse_options_header

        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidRequest("the body must be multipart/form-data with a boundary")
        self._directory = directory
        self._length = length
        self._options = parse_options_header
        self._file: BinaryIO | None = None
        self._name = ""
        self._written = 0
        self._head: HeadCheck | None = None
        self._field, self._value = b"", b""
        self._disposition = b""
        self._ended = False
        self._parser = MultipartParser(options[b"boundary"], self._callbacks())  # type: ignore[arg-type]

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body.

        Raises:
            InvalidRequest: they are not as the format says, or a part is not one of the files.
            BodyTooLarge: the config is too long.
            OSError: the disk is full or broken.
        """
        from python_multipart.exceptions import FormParserError

        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"the body is not valid multipart/form-data: {error}") from error
        except SourceError as error:
            raise InvalidRequest(str(error), code=error.code) from error

    def finish(self) -> None:
        """Check that all is there.

        Raises:
            InvalidRequest: the body ended early, or a file is missing.
        """
        if not self._ended:
            raise InvalidRequest("the body ends before its last boundary")
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            if not (self._directory / name).exists():
                raise InvalidRequest(f"the body has no part {name}", param=name)

    def close(self) -> None:
        """Close what is open."""
        if self._file is not None:
            self._file.close()
            self._file = None

    # --- the parser's callbacks --------------------------------------------------------------

    def _callbacks(self) -> dict[str, Callable[..., None]]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._open,
            "on_part_data": self._data,
            "on_part_end": self.close,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._disposition = b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = self._value
        self._field, self._value = b"", b""

    def _open(self) -> None:
        _, options = self._options(self._disposition)
        given = [options.get(key, b"").decode("utf-8", "replace") for key in (b"name", b"filename")]
        self._name = next((name for name in given if name in (CONFIG_NAME, WEIGHTS_NAME)), "")
        if not self._name:
            text = (
                f"part {given[1][:100] or given[0][:100]!a} must be {CONFIG_NAME} or {WEIGHTS_NAME}"
            )
            raise InvalidRequest(text, param="filename")
        try:
            self._file = (self._directory / self._name).open("xb")
        except FileExistsError:
            raise InvalidRequest(f"part {self._name} is there twice", param="filename") from None
        self._written = 0
        weights = self._name == WEIGHTS_NAME and self._length is not None
        self._head = HeadCheck(WEIGHTS_NAME, self._length or 0) if weights else None

    def _data(self, data: bytes, start: int, end: int) -> None:
        assert self._file is not None
        self._written += end - start
        if self._name == CONFIG_NAME and self._written > MAX_CONFIG_BYTES:
            raise BodyTooLarge(f"{CONFIG_NAME} is over the limit of {MAX_CONFIG_BYTES} bytes")
        if self._head is not None:
            self._head.feed(data[start:end])
        self._file.write(data[start:end])

    def _end(self) -> None:
        self._ended = True
