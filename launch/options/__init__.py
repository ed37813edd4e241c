"""The server's options: configuration fields, and their three sources.

Reading them imports neither torch nor transformers, so that ``--help`` answers at once.
"""

from launch.options.config import ServeConfig
from launch.options.read import Options, read_options, read_options_or_exit, resolved, version
from launch.options.sources import OptionError

__all__ = [
    "OptionError",
    "Options",
    "ServeConfig",
    "read_options",
    "read_options_or_exit",
    "resolved",
    "version",
]
