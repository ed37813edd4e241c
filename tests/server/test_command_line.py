"""The operators' command line, where there is nothing for it."""

import asyncio

import pytest

from launch.adapters.__main__ import main
from launch.adapters.arguments import make_parser

pytestmark = pytest.mark.anyio


async def test_without_operators_there_is_no_control_plane(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code = await asyncio.to_thread(main, ["--url", f"http://127.0.0.1:{port}/v1", "list"])
    assert code == 1
    assert "there is no control plane" in capsys.readouterr().err


def test_common_options_stand_before_the_command_or_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TP_ENGINE_URL", "http://from-environment")
    given = ["--json", "--url", "http://given", "--key-file", "keys"]
    for command in (["list"], ["show", "x"], ["delete", "x"], ["flush"]):
        for line in ([*given, *command], [*command, *given], [*given[:1], *command, *given[1:]]):
            parsed = make_parser().parse_args(line)
            assert (parsed.json, parsed.url, parsed.key_file) == (True, "http://given", "keys")
        parsed = make_parser().parse_args(command)
        assert (parsed.json, parsed.url, parsed.key_file) == (
            *(False, "http://from-environment", None),
        )
