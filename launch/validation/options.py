"""The command line of ``launch/validate_sharding.py``; imports neither torch nor transformers."""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tp_engine.config import ConfigError, EngineConfig

PATIENCE = 1800.0
"""Seconds that a rank waits for the others: while rank 0 works alone, they wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateOptions:
    """What to check."""

    engine: EngineConfig
    """What is loaded, as by the server."""
    oracle: bool
    """Compare with transformers, PEFT and bitsandbytes too."""
    self_test: bool
    """Prove that damage is found."""
    seed: int | None
    """Of the self-test's damages; None: rank 0 draws one."""
    rounds: int
    """Damages of the self-test."""
    json: str | None
    """File for the machines' report, which is printed anyway."""


def read_options(argv: Sequence[str] | None = None) -> ValidateOptions:
    """Read the command line; prints and exits with status 2 where it is wrong."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        engine = EngineConfig(
            model=given.model,
            lora=tuple(_pair(text) for text in given.lora),
            quantize=given.quantize,
            dtype=given.dtype,
            device=given.device,
            backend=given.backend,
            adapter_memory_fraction=1.0,
            enable_prefix_caching=False,
            rank_timeout=PATIENCE,
        )
    except ConfigError as error:
        parser.error(str(error))
    if given.json is not None and os.environ.get("RANK", "0") == "0":
        _check_writable(parser, given.json)
    if given.rounds < 1:
        parser.error(f"argument --rounds: {given.rounds} must be at least 1")
    return ValidateOptions(
        engine=engine,
        oracle=given.oracle,
        self_test=given.self_test,
        seed=given.seed,
        rounds=given.rounds,
        json=given.json,
    )


def _check_writable(parser: argparse.ArgumentParser, path: str) -> None:
    """Before the work, not after it."""
    try:
        Path(path).open("a").close()
    except OSError as error:
        parser.error(f"argument --json: {path} cannot be written: {error}")


def draw_seed() -> int:
    """A seed for a self-test that was given none."""
    return secrets.randbelow(2**31)


def _pair(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not name or not equals:
        raise ConfigError("lora", text, "NAME=DIRECTORY")
    return name, path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="validate_sharding.py",
        description="Load a model as the server does and compare what every rank holds, tensor by "
        "tensor and bit for bit, with the unsharded files; then layer outputs, logits and greedy "
        "tokens with world size 1. Exits with 1 where anything differs.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="base model: a directory or a Hub id")
    add("--lora", action="extend", nargs="+", default=[], metavar="NAME=DIR", help="an adapter")
    add("--quantize", choices=["nf4"], help="quantise a full-precision checkpoint while loading")
    add("--dtype", default="auto", metavar="TYPE", help="float32, bfloat16, float16 or auto")
    add("--device", default="auto", metavar="DEVICE", help="cpu, cuda or auto")
    add("--backend", default="auto", metavar="BACKEND", help="nccl, gloo or auto")
    add("--oracle", action="store_true", help="also run transformers, PEFT and bitsandbytes")
    add("--self-test", action="store_true", help="damage live tensors: each must be named")
    add("--seed", type=int, help="of the self-test (default: drawn and printed)")
    add("--rounds", type=int, default=20, help="damages of the self-test (default: 20)")
    add("--json", metavar="FILE", help="write the JSON report to a file, too")
    return parser
