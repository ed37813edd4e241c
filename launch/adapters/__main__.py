"""Entry point: ``python -m launch.adapters COMMAND …``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import httpx
from rich.console import Console

from launch.adapters.arguments import UsageError, make_parser, settings_of
from launch.adapters.client import ControlPlane, Refused
from launch.adapters.commands import Failed, Output, run

EXIT_REFUSED, EXIT_USAGE, EXIT_UNREACHABLE = 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code.

    0 done, 1 refused or failed by the server, 2 a command line that says nothing sensible or a file
    that cannot be read, 3 no server was reached, 130 interrupted.
    """
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    arguments = make_parser().parse_args(argv)
    try:
        settings = settings_of(arguments)
        with ControlPlane(settings) as server:
            run(arguments, server, Output(json=arguments.json))
            sys.stdout.flush()
        return 0
    except BrokenPipeError:  # whoever reads has enough; what is buffered would raise at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (UsageError, OSError) as error:
        errors.print(f"error: {error}", markup=False)
        return EXIT_USAGE
    except (Refused, Failed) as error:
        errors.print(f"error: {error}", markup=False)
        return EXIT_REFUSED
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        errors.print(f"error: no answer from {arguments.url}: {reason}", markup=False)
        return EXIT_UNREACHABLE
    except KeyboardInterrupt as stop:
        told = str(stop) or "a call that the server has wholly received goes on there"
        errors.print(f"interrupted: {told}", markup=False)
        return 130


if __name__ == "__main__":
    sys.exit(main())
