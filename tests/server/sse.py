"""Reading event streams."""

from __future__ import annotations

import json
from typing import Any

import httpx


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The stream's events; it must have ended with ``[DONE]``."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def texts(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """Text of each index, of either API."""
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + piece
    return found


def error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response that must have ``status`` and the one error shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = json.loads(response.text, parse_constant=lambda name: 1 / 0)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    found: dict[str, Any] = body["error"]
    return found
