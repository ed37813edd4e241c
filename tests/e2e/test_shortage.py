"""A rank of a service is not given memory for an adapter: that load fails, and nothing else."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.service import Server
from tests.helpers.tiny_models import make_peft_adapter

PROMPT = [50, 60, 70, 80, 90]
SHORT = """
import os, runpy, sys
sys.path.insert(0, os.getcwd())
import torch
from tp_engine.tiers import delivery
from tp_engine.adapters import packing
given = packing.zeroed_pages

def zeroed_pages(pages, page_bytes):
    if os.path.exists("{flag}" + os.environ["RANK"]):
        torch.empty(1 << 50, dtype=torch.uint8)
    return given(pages, page_bytes)

delivery.zeroed_pages = packing.zeroed_pages = zeroed_pages
sys.argv[0] = "launch/serve.py"
runpy.run_path("launch/serve.py", run_name="__main__")
"""
"""serve.py; a rank has no memory for page images while there is a file with its number."""

pytestmark = pytest.mark.slow


def test_a_load_without_memory_fails_on_all_ranks_and_the_service_goes_on(
    model: Path, tmp_path: Path
) -> None:
    admin, script, flag = tmp_path / "admin", tmp_path / "short.py", tmp_path / "short-on-"
    admin.write_text("sk-admin")
    script.write_text(SHORT.format(flag=flag))
    for seed, name in enumerate("ab"):
        make_peft_adapter(tmp_path / name, model, seed=seed, use_dora=name == "b")
    options = ("--served-model-name=base", "--num-pages=300", f"--admin-key-file={admin}")
    store = (f"--adapter-root={tmp_path}", f"--adapter-store={tmp_path / 'store'}")
    with Server(tmp_path, model, *options, *store, script=str(script)) as server:
        server.wait_ready()

        def load(name: str) -> httpx.Response:
            return httpx.post(
                f"{server.url}/v1/load_lora_adapter",
                json={"lora_name": name, "lora_path": str(tmp_path / name)},
                headers={"authorization": "Bearer sk-admin"},
                timeout=60.0,
            )

        with server.stream(max_tokens=2000) as running:
            running.read(3)
            for name, rank in (("a", 0), ("a", 1), ("b", 1)):
                short = Path(f"{flag}{rank}")
                short.touch()
                refused = load(name)
                short.unlink()
                assert refused.status_code == 503, refused.text
                error: dict[str, Any] = refused.json()["error"]
                assert error["code"] == "out_of_memory" and f"adapter '{name}'" in error["message"]
                assert "bytes are wanted" in error["message"]
                assert server.complete(model=name, prompt=PROMPT).status_code == 404
            for name in "ab":
                assert load(name).status_code == 200
                assert server.complete(model=name, prompt=PROMPT).status_code == 200
            running.read(3)
            assert running.error is None
        assert "the service ends" not in server.log
