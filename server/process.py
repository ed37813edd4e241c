"""Starting the front end from rank 0, without importing any of it there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from server.settings import FrontEndSettings

_ROOT: Final = Path(__file__).resolve().parents[1]
"""Where our packages are."""


def start_front_end(settings: FrontEndSettings) -> subprocess.Popen[bytes]:
    """Start the front-end process; its parent is the caller.

    It logs to this process's standard error. It exits with 0 after a drain, and with 1 on a
    setting that does not work (the port is taken, no tokenizer) or when the engine is lost.
    """
    # The packages of this very checkout, whatever the working directory has by the same names.
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    # Its own process group: a terminal's Ctrl-C is for rank 0 alone, which then decides.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "server.main"],
        stdin=subprocess.PIPE,
        process_group=0,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert process.stdin is not None
    with process.stdin:
        process.stdin.write(settings.to_json())
    return process
