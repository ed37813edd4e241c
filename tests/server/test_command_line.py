"""The operators' command line, where there is nothing for it."""

import asyncio

import pytest

from launch.adapters.__main__ import main

pytestmark = pytest.mark.anyio


async def test_without_operators_there_is_no_control_plane(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code = await asyncio.to_thread(main, ["--url", f"http://127.0.0.1:{port}/v1", "list"])
    assert code == 1
    assert "there is no control plane" in capsys.readouterr().err
