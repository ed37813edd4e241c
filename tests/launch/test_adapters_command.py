"""The operators' command line, as far as it needs no server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launch.adapters.__main__ import EXIT_UNREACHABLE, EXIT_USAGE, main

NOBODY = "--url=http://127.0.0.1:1"
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", ["load", "upload", "push"])
def test_a_name_that_no_adapter_may_have_is_refused_before_anything_is_sent(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("", " x", "x" * 257, "x@deadbeef"):
        with pytest.raises(SystemExit) as ended:
            main([NOBODY, command, name, str(tmp_path)])
        assert ended.value.code == EXIT_USAGE
        assert "argument name: adapter name" in capsys.readouterr().err


def test_a_name_that_one_may_have_is_left_to_the_server() -> None:
    assert main([NOBODY, "load", "x", "/srv/x"]) == EXIT_UNREACHABLE


def test_the_command_needs_no_torch() -> None:
    code = "import sys, launch.adapters.__main__; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "False"
