"""Finding the base model: paths stay local, and every trouble with the Hub is told apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.launch.fake_hub import COMMIT, fake_hub
from tp_engine.config import EngineConfig
from tp_engine.hub import ModelNotFound, download_model, local_model

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "path", ["/no/such/dir", "./missing", "~/missing/model", "~nobody-here/x", "a/b/c", "..", "x/"]
)
def test_a_path_never_falls_through_to_the_hub(
    path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise AssertionError("asked the Hub")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    for locate in (download_model, local_model):
        if path == "..":
            assert locate(EngineConfig(model=path)) == tmp_path / ".."
        else:
            with pytest.raises(ModelNotFound, match=r"directory /.* does not exist: check the"):
                locate(EngineConfig(model=path))


def test_an_existing_directory_wins_over_a_hub_id_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert download_model(EngineConfig(model="org/name")) == tmp_path / "org" / "name"
    with pytest.raises(ModelNotFound, match="revision='main' is for Hub models"):
        download_model(EngineConfig(model="org/name", revision="main"))


def test_offline_a_hub_model_that_is_not_cached_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFound, match="HF_HUB_OFFLINE is set, there is no directory org/m,"):
        download_model(EngineConfig(model="org/m"))


def hub_session(endpoint: str, cache: Path, calls: list[list[Any]]) -> list[str]:
    """Run calls of download_model or local_model in a fresh process that uses this Hub."""
    script = """
import json, sys
from tp_engine import hub
from tp_engine.config import EngineConfig
for name, model, revision in json.loads(sys.argv[1]):
    try:
        print(json.dumps(str(getattr(hub, name)(EngineConfig(model=model, revision=revision)))))
    except hub.ModelNotFound as error:
        print(json.dumps(f"refused: {error}"))
"""
    environ = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    environ |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(calls)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_hub_model_is_fetched_once_and_its_troubles_are_told_apart(tmp_path: Path) -> None:
    with fake_hub() as endpoint:
        before, fetched, found, gated, missing, revision = hub_session(
            endpoint,
            tmp_path,
            [
                ["local_model", "org/good", None],
                ["download_model", "org/good", None],
                ["local_model", "org/good", None],
                ["download_model", "org/gated", None],
                ["download_model", "org/missing", None],
                ["download_model", "org/good", "nothing"],
            ],
        )
    assert before.startswith("refused: there is no directory org/good, and Hub model org/good is n")
    assert found == fetched
    assert Path(fetched).name == COMMIT
    names = {path.name for path in Path(fetched).rglob("*")}
    assert names == {"config.json", "tokenizer.json", "model.safetensors"}
    assert "org/gated is gated" in gated
    assert "HF_TOKEN" in gated
    assert "no Hub model org/missing can be seen, nor is there a directory" in missing
    assert "has no revision 'nothing'" in revision
    still, unreachable = hub_session(
        endpoint,
        tmp_path,
        [["download_model", "org/good", None], ["download_model", "org/other", None]],
    )
    assert still == fetched
    assert unreachable.startswith("refused: the Hub can't be reached (")
