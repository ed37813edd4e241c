"""Kernel tests under NVIDIA's compute-sanitizer.

    python tests/kernels/sanitize.py memcheck|racecheck|initcheck|synccheck [FAMILY ...]

A few tests of each family, one process a family, side by side; each ends within a minute once
Triton's cache holds the kernels (``--warm`` runs the same tests without the tool first). Ends with
exit code 1 when the tool has found an error or a test failed, with the output of that family.

One kind of report is counted and let through: racecheck's of the bytes by which Triton hands warps
their part of a specialised kernel, between the barriers that Triton sets.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
TESTS = {
    "nf4": ("test_nf4_gpu.py", "shape2-7 or shape3-64 or exactly or scaled or unpacked"),
    "few": ("test_nf4_gpu.py", "norm_linear and shape2 or few_rows"),
    "wide": ("test_nf4_gpu.py", "product_for_many_rows and shape2"),
    "lora": ("test_lora_gpu.py", "equals_reference and bfloat16"),
    "one-launch": ("test_lora_add_gpu.py", "equals_reference and bfloat16"),
    "long": ("test_lora_prefill_gpu.py", "skewed and bfloat16"),
    "silu": ("test_lora_silu_gpu.py", "skewed and bfloat16"),
    "attention": ("test_attention_gpu.py", "equals_reference and 128-None-dtype2"),
    "window": ("test_attention_gpu.py", "equals_reference and 80-100-dtype2"),
    "rotate": ("test_attention_gpu.py", "rotate_attend and 128-False-None"),
    "hopper": ("test_attention_gpu.py", "hopper"),
    "small": ("test_attention_gpu.py", "(rotate_store or small_ops) and dtype2"),
    "draw": ("test_sampling_gpu.py", "few_columns and bfloat16 or entry and 256"),
}
"""File and selection by family."""
CAPTURING = ("rotate",)
"""Families whose tests capture CUDA graphs, in which no memory may be asked of the driver."""
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OTHERS = "_Z"
"""In names of kernels in C++, such as torch's, whose shared memory is no matter of ours."""
ERRORS_FOUND = 9
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*|^\d+ passed.*", re.MULTILINE)
RACES = re.compile(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)")
# Some follow pytest's dots on their line.
REPORT = re.compile(r"(=+ \w+: Race reported between .*\n(?:=+ +and .*\n)*)(?:=+ *\n)?")
ACCESS = re.compile(r"(Read|Write) access at (\w+)\+\w+ in ([\w.]+:\d+)")
SPECIALISED = {
    "nf4_wide": ROOT / "kernels" / "nf4" / "wide_kernel.py",
    "hopper_kernel": ROOT / "kernels" / "attention" / "hopper_kernel.py",
}
"""Kernels whose warps have separate parts, by name."""
SHOWN = 20
"""Reports of races that are printed."""


def start(family: str, tool: str | None, output: IO[str]) -> subprocess.Popen[str]:
    """Run one family's tests, under ``tool`` if any."""
    name, selection = TESTS[family]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider"]
    command += [f"tests/kernels/{name}", "-k", selection]
    environment = dict(os.environ)
    if tool is not None:
        if family not in CAPTURING:
            # Without torch's cache of memory every tensor has bounds that the tool knows.
            environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        options = ["--target-processes", "application-only", "--print-limit", "10000"]
        options += ["--error-exitcode", str(ERRORS_FOUND)]
        if tool == "racecheck":
            options += ["--kernel-name-exclude", f"kns={OTHERS}"]
        command = ["compute-sanitizer", "--tool", tool, *options, *command]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
    )


@cache
def hand_over(kernel: str) -> tuple[str, str]:
    """Return (place of a specialised kernel's first line, of its call of `warp_specialize`)."""
    path = SPECIALISED[kernel]
    lines = path.read_text().splitlines()
    marks = (f"def {kernel}(", "    gl.warp_specialize(")
    first, call = (f"{path.name}:{lines.index(mark) + 1}" for mark in marks)
    return first, call


def is_hand_over(report: str) -> bool:
    """Whether warps that begin or end read what the first warps wrote for them, and no more.

    Triton gives the read and the write at the end the kernel's first line, the write at the
    beginning that of the call.
    """
    accesses = ACCESS.findall(report)
    if len(accesses) != len(report.splitlines()):
        return False
    for kind, kernel, place in accesses:
        if kernel not in SPECIALISED:
            return False
        first, call = hand_over(kernel)
        if place not in ((first,) if kind == "Read" else (first, call)):
            return False
    return {kind for kind, _, _ in accesses} == {"Read", "Write"}


def judge(code: int, output: str) -> tuple[bool, int]:
    """Return (whether a run is clean, number of reports of a hand-over).

    Where there is no device all tests are skipped, and the tool has nothing to say.
    """
    reports = REPORT.findall(output)
    known = sum(map(is_hand_over, reports))
    total = sum(int(number) for found in RACES.findall(output) for number in found)
    let_through = code == ERRORS_FOUND and known == len(reports) == total > 0
    passed = any(line[0].isdigit() for line in SUMMARY.findall(output))
    return passed and (code == 0 or let_through), known


def shortened(output: str) -> str:
    """The output without reports of a hand-over and with SHOWN of the others."""
    others = [report for report in REPORT.findall(output) if not is_hand_over(report)]
    return "".join(others[:SHOWN]) + REPORT.sub("", output)


def run(families: Sequence[str], tool: str | None) -> bool:
    """Run families side by side; whether all are clean. Prints a line for each."""
    began = time.monotonic()
    results = []
    with ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile("w+")) for _ in families]
        processes = [
            start(family, tool, file) for family, file in zip(families, files, strict=True)
        ]
        for family, process, file in zip(families, processes, files, strict=True):
            code = process.wait()
            file.seek(0)
            output = file.read()
            clean, known = judge(code, output)
            verdict = "clean" if clean else f"NOT CLEAN (exit code {code})"
            verdict += f", {time.monotonic() - began:.0f} s"
            verdict += f", {known} reports of a hand-over" if known else ""
            print(f"{tool or 'plain':10}{family:10} {verdict}: {SUMMARY.findall(output)}")
            if not clean:
                print(shortened(output))
            sys.stdout.flush()
            results.append(clean)
    return all(results)


def main() -> int:
    """Run what the command line asks for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("families", nargs="*", choices=[[], *TESTS], metavar="FAMILY")
    parser.add_argument("--warm", action="store_true", help="compile the kernels first")
    arguments = parser.parse_args()
    families = arguments.families or list(TESTS)
    if arguments.warm and not run(families, None):
        return 1
    return 0 if run(families, arguments.tool) else 1


if __name__ == "__main__":
    sys.exit(main())
