"""The options as a page of documentation: ``python -m launch.options.page > docs/options.md``."""

from __future__ import annotations

from collections.abc import Iterator

from launch.options.config import ServeConfig
from launch.options.fields import Option, all_options
from launch.options.sources import CONFIG_VARIABLE, default_of
from tp_engine.config import EngineConfig

_TITLES = {EngineConfig: "The engine", ServeConfig: "The server"}
_HEAD = f"""# Options of the server

Written by `python -m launch.options.page`; `launch/serve.py --help` says the same. An option
`--some-name` is also `some_name:` in a YAML file (`--config FILE`, or `{CONFIG_VARIABLE}`), and
`TP_ENGINE_SOME_NAME` in the environment, lists separated by commas there. A flag wins over the
environment, the environment over the file. `none` stands for no value. Sizes are bytes, or have a
unit: `512MiB`, `2GB`.
"""


def page() -> str:
    """The whole page, Markdown."""
    return "\n".join((_HEAD, *_tables()))


def _tables() -> Iterator[str]:
    for owner, title in _TITLES.items():
        yield f"## {title}\n\n| option | default | |\n|---|---|---|"
        yield from (_line(option) for option in all_options() if option.owner is owner)
        yield ""


def _line(option: Option) -> str:
    flag = option.flag if option.kind is bool else f"{option.flag} {option.metavar}"
    if option.many:
        flag += " …"
    if option.kind is bool:
        flag += f"`, `--no-{option.flag.removeprefix('--')}"
    return f"| `{flag}` | {default_of(option)} | {option.help} |"


if __name__ == "__main__":
    print(page(), end="")
