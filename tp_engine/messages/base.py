"""What all messages have in common."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all messages; the class name is the tag on the wire."""
