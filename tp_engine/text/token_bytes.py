"""The bytes that one vocabulary entry stands for, for log-probability reports.

Decoding a lone id through the tokenizer loses what only neighbours complete: half a character
becomes U+FFFD and a leading space is stripped. The vocabulary entry itself has neither fault.
"""

from __future__ import annotations

import re

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "\u2581"


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE (GPT-2) uses for the 256 byte values."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    alphabet = {chr(value): value for value in printable}
    alphabet.update({chr(256 + index): value for index, value in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_level_alphabet()


def token_bytes(entry: str, *, byte_level: bool) -> bytes:
    """Bytes of the vocabulary entry ``entry``.

    Args:
        entry: the token as the vocabulary spells it.
        byte_level: whether the vocabulary is spelt in the byte-level alphabet; else sentencepiece
            spelling (``<0xNN>`` bytes, U+2581 for a space) is assumed.
    """
    if byte_level:
        if all(character in _BYTE_OF for character in entry):
            return bytes(_BYTE_OF[character] for character in entry)
        return entry.encode()
    if found := _BYTE_FALLBACK.fullmatch(entry):
        return bytes([int(found[1], 16)])
    return entry.replace(_SPACE_MARK, " ").encode()


def printable_token(data: bytes) -> str:
    """``data`` as text, or as ``bytes:\\xNN…`` when it is no whole UTF-8 (unique per token)."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in data)
