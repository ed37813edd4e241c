"""How many adapters and tokens fit, before anything is loaded.

    python -m launch.plan --model DIR --gpus 2 --memory 80GiB --adapters profile.json

The profile lists kinds of adapters: ``[{"rank": 16, "count": 200}, {"rank": 64, "count": 20,
"targets": ["q_proj", "v_proj", "lm_head"], "saved": ["embed_tokens"]}]``; ``dora`` and ``bias`` as
true, and ``tokens``, how many rows of the embedding are replaced, may be added.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.options.fields import all_options
from tp_engine.config import GIB, MIB, EngineConfig, parse_size

AS_SERVED = (
    "quantize",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
)
"""Options that mean what they mean for the server."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan; 2 where something is wrong with what was given."""
    parser = _parser()
    given = parser.parse_args(argv)
    for option, least in (("gpus", 1), ("kv_tokens", 0)):
        if getattr(given, option) < least:
            flag = "--" + option.replace("_", "-")
            parser.error(f"argument {flag}: {getattr(given, option)} must be at least {least}")
    from launch.adapter_kinds import read_profile
    from launch.planning import Capacity, as_json, plan_capacity
    from tp_engine.hub import local_model
    from tp_engine.models import ModelSpec

    try:
        config = EngineConfig(
            model=given.model,
            **{name: value for name, value in vars(given).items() if name in AS_SERVED},
        )
        spec = ModelSpec.from_directory(local_model(config))
        capacity: Capacity = plan_capacity(
            spec,
            config.resolve(cuda=True, model_positions=spec.max_position_embeddings),
            given.gpus,
            memory=given.memory,
            kinds=() if given.adapters is None else read_profile(given.adapters),
            kv_tokens=given.kv_tokens,
        )
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(as_json(capacity)))
    else:
        _print_table(capacity)
    return 0


def _print_table(capacity: object) -> None:
    from launch.planning import CERTAINTY, Capacity

    assert isinstance(capacity, Capacity)
    layout = capacity.layout
    print("bytes of a rank, the heaviest one where they differ")
    print(f"  base weights        {capacity.need.weights / GIB:10.2f} GiB (estimate)")
    print(f"  scratch of a step   {capacity.need.scratch / GIB:10.2f} GiB (estimate)")
    print(f"  arena               {capacity.arena_bytes / GIB:10.2f} GiB")
    print(
        f"                      {capacity.pages:10d} pages of {layout.page_bytes} bytes, "
        f"{layout.block_tokens} tokens each"
    )
    print(f"  KV tokens           {capacity.kv_tokens:10d} without adapters")
    for need in capacity.kinds:
        kind = need.kind
        saved = f", {' and '.join(kind.saved)} whole" if kind.saved else ""
        tokens = f", {kind.tokens} token rows" if kind.tokens else ""
        print(
            f"  LoRA rank {kind.rank:<10}{need.allocated / MIB:10.2f} MiB in {need.pages} "
            f"pages, {need.row_bytes / MIB:.2f} MiB of rows, {len(kind.targets)} kinds of modules"
            f"{saved}{tokens}; {kind.count} adapters"
        )
    if capacity.kinds:
        print(
            f"  at once             {capacity.drawn:10d} adapters as drawn from the profile "
            f"({CERTAINTY:.0%} of draws), beside {capacity.kv_tokens_left} KV tokens"
        )
        host, disk = capacity.host_bytes / GIB, capacity.disk_bytes / GIB
        print(f"  host memory         {host:10.2f} GiB a rank to keep all adapters warm")
        print(f"  store               {disk:10.2f} GiB for a revision of each")


def _shown(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type of `convert`: argparse shows the message of no other error than its own."""

    def converted(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


def _parser() -> argparse.ArgumentParser:
    what, _, profile = (__doc__ or "").replace("``", "").strip().split("\n\n")
    parser = argparse.ArgumentParser(prog="python -m launch.plan", description=what, epilog=profile)
    add = parser.add_argument
    add("--model", required=True, help="base model: a directory or a Hub id in the cache")
    add("--gpus", type=int, required=True, metavar="N", help="ranks, one a GPU")
    size = _shown(parse_size)
    add("--memory", type=size, required=True, metavar="SIZE", help="of a GPU, such as 80GiB")
    add("--adapters", type=Path, metavar="FILE", help="profile of the adapters, JSON")
    add("--kv-tokens", type=int, default=0, metavar="N", help="that must have room beside them")
    for option in all_options():
        if option.name in AS_SERVED:
            add(
                option.flag,
                type=_shown(option.convert),
                default=argparse.SUPPRESS,
                metavar=option.metavar,
                help=option.help.replace("%", "%%"),
            )
    add("--json", action="store_true", help="one JSON line instead of the table")
    return parser


if __name__ == "__main__":
    sys.exit(main())
