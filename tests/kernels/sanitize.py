"""Kernel tests under NVIDIA's compute-sanitizer.

    python tests/kernels/sanitize.py memcheck|racecheck|initcheck|synccheck [FAMILY ...]

A few tests of each family, one process a family, side by side; each ends within a minute once
Triton's cache holds the kernels (``--warm`` runs the same tests without the tool first). Ends with
exit code 1 when the tool has found an error or a test failed, with the output of that family.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

ROOT = Path(__file__).resolve().parents[2]
TESTS = {
    "nf4": ("test_nf4_gpu.py", "shape2 or shape3 or begin_inside or unpacked"),
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
    "draw": ("test_sampling_gpu.py", "(greedy or draws) and bfloat16"),
}
"""File and selection by family."""
CAPTURING = ("rotate", "draw")
"""Families whose tests capture CUDA graphs, in which no memory may be asked of the driver."""
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
ERRORS_FOUND = 9
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*|^\d+ passed.*", re.MULTILINE)


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
        options = ["--target-processes", "application-only", "--print-limit", "10"]
        options += ["--error-exitcode", str(ERRORS_FOUND)]
        command = ["compute-sanitizer", "--tool", tool, *options, *command]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True
    )


def run(families: list[str], tool: str | None) -> bool:
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
            found = [match[0] for match in SUMMARY.finditer(output)]
            # Where there is no device all tests are skipped, and the tool has nothing to say.
            clean = code == 0 and any("passed" in line for line in found)
            seconds = time.monotonic() - began
            verdict = "clean" if clean else f"NOT CLEAN (exit code {code})"
            print(
                f"{tool or 'plain':10}{family:10} {verdict}, {seconds:.0f} s: {found}", flush=True
            )
            if not clean:
                print(output)
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
