"""The outcome: a table for people, and one JSON line for machines."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

import torch

from launch.options import version
from launch.validation.result import Check, Mismatch, Result
from launch.validation.self_test import SelfTest
from tp_engine.adapters import AdapterRevision
from tp_engine.rank import Rank

SHOWN = 20
"""Mismatches that are listed for people; the JSON has all."""
_HEADER = ("check", "tensors", "elements", "mismatches", "max error", "seconds")
_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Of one run, on rank 0."""

    rank: Rank
    adapters: Mapping[str, AdapterRevision]
    result: Result
    self_test: SelfTest | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.result.mismatches and (self.self_test is None or self.self_test.ok)

    def text(self) -> str:
        """For people."""
        config, comm = self.rank.config, self.rank.comm
        lines = [
            f"{config.model} at world size {comm.world} on {comm.device.type} in {config.dtype}; "
            f"adapters: {', '.join(self.adapters) or 'none'}",
            *_table(self.result.checks),
            *_listed(self.result.mismatches),
        ]
        if self.self_test is not None:
            lines += _self_test_lines(self.self_test)
        lines.append(f"{'OK' if self.ok else 'FAILED'} after {self.seconds:.1f} s")
        return "\n".join(lines)

    def line(self) -> str:
        """For machines: one line of JSON."""
        adapters = self.adapters
        return json.dumps(
            {
                "program": "validate_sharding",
                "ok": self.ok,
                "versions": _versions(),
                "world": self.rank.comm.world,
                "device": self.rank.comm.device.type,
                "dtype": self.rank.config.dtype,
                "quantize": self.rank.config.quantize,
                "model": self.rank.config.model,
                "model_digest": self.rank.base_digest,
                "adapters": {name: revision.digest for name, revision in adapters.items()},
                "checks": [_finite(asdict(check)) for check in self.result.checks],
                "mismatches": [asdict(mismatch) for mismatch in self.result.mismatches],
                "self_test": None if self.self_test is None else self.self_test.as_dict(),
                "seconds": round(self.seconds, 3),
            }
        )


def _finite(values: dict[str, object]) -> dict[str, object]:
    """JSON knows no infinity."""
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


def _versions() -> dict[str, str]:
    found = {"tp-engine": version(), "python": platform.python_version()}
    installed = {dist.name.lower(): dist.version for dist in metadata.distributions()}
    found |= {name: installed[name] for name in _LIBRARIES if name in installed}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _table(checks: Sequence[Check]) -> list[str]:
    rows = [_HEADER]
    for check in checks:
        numbers = (f"{check.tensors:,}", f"{check.elements:,}", f"{check.mismatches:,}")
        rows.append((check.name, *numbers, f"{check.error:.2g}", f"{check.seconds:.2f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    return ["  ".join([row[0].ljust(widths[0]), *_right(row, widths)]) for row in rows]


def _right(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]


def _listed(mismatches: Sequence[Mismatch]) -> list[str]:
    lines = [f"MISMATCH {mismatch}" for mismatch in mismatches[:SHOWN]]
    left = len(mismatches) - len(lines)
    return lines + ([f"... and {left} more"] if left > 0 else [])


def _self_test_lines(test: SelfTest) -> list[str]:
    lines = [f"self-test with --seed {test.seed}: one bit damaged a round"]
    for number, each in enumerate(test.rounds, 1):
        verdict = "named" if each.ok else f"FAILED: found {each.found}, after {each.after}"
        place = f"{each.tensor} ({each.kind}) rank {each.rank} {each.index}"
        lines.append(f"{number:4d}  {place}: {verdict}")
    if not test.clean:
        lines.append("FAILED: the comparison is not clean after the last round")
    return lines
