"""Corrupt, pickled and misplaced files: refused with a reason, and nothing in them is run."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sharding import ModelDims
from tests.adapters.writing import plain_config, plain_tensors, write_adapter
from tp_engine.adapters import AdapterError, read_adapter, resolve_adapter_path
from tp_engine.models.spec import ModelSpec

WEIGHTS = "adapter_model.safetensors"


def header(entries: object, data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


CORRUPT: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda good: b"",
    "three_bytes": lambda good: good[:3],
    "huge_header_length": lambda good: struct.pack("<Q", 0xFFFFFF0000003C) + good[8:],
    "header_longer_than_file": lambda good: struct.pack("<Q", len(good)) + good[8:],
    "header_not_utf8": lambda good: good[:8] + b"\xff\xfe" + good[10:],
    "header_not_json": lambda good: good[:8] + b"!" + good[9:],
    "header_a_list": lambda good: header([1]),
    "two_bytes_cut_off": lambda good: good[:-2],
    "trailing_bytes": lambda good: good + b"\0\0",
    "overflowing_size": lambda good: header({"x": entry([2**40, 2**40], 0, 4)}, b"\0" * 4),
    "overlapping": lambda good: header({"x": entry([1], 0, 4), "y": entry([1], 0, 4)}, b"\0" * 4),
    "lfs_pointer": lambda good: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    ),
    "pickle_under_the_safe_name": lambda good: pickle.dumps({"x": 1}),
}


@pytest.mark.parametrize("kind", CORRUPT)
def test_corrupt_safetensors_are_refused(
    kind: str, dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path, plain_config(), plain_tensors(dims))
    file = adapter / WEIGHTS
    file.write_bytes(CORRUPT[kind](file.read_bytes()))
    with pytest.raises(AdapterError, match=WEIGHTS) as caught:
        read_adapter(adapter, spec)
    assert caught.value.code == "weights_corrupt"


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt"])
def test_pickled_weights_are_refused_and_never_run(
    name: str, spec: ModelSpec, tmp_path: Path
) -> None:
    mark = tmp_path / "exploded"
    adapter = write_adapter(tmp_path / "adapter", plain_config(), None)
    torch.save({"x": Bomb(mark)}, adapter / name)
    with pytest.raises(AdapterError, match=name) as caught:
        read_adapter(adapter, spec)
    assert caught.value.code == "weights_missing"
    assert not mark.exists()
    torch.load(adapter / name, weights_only=False)
    assert mark.exists()  # the bomb was live


def test_a_pickle_beside_safetensors_is_left_alone(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    mark = tmp_path / "exploded"
    adapter = write_adapter(tmp_path / "adapter", plain_config(), plain_tensors(dims))
    torch.save({"x": Bomb(mark)}, adapter / "adapter_model.bin")
    assert read_adapter(adapter, spec).applied == 14
    assert not mark.exists()


def test_missing_files_are_named(dims: ModelDims, spec: ModelSpec, tmp_path: Path) -> None:
    for index, (config, tensors, code, name) in enumerate(
        [
            (None, plain_tensors(dims), "config_missing", "adapter_config.json"),
            (plain_config(), None, "weights_missing", WEIGHTS),
        ]
    ):
        with pytest.raises(AdapterError, match=name) as caught:
            read_adapter(write_adapter(tmp_path / str(index), config, tensors), spec)
        assert caught.value.code == code


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
def test_a_link_out_of_the_adapter_is_refused(
    name: str, dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", plain_config(), plain_tensors(dims))
    (adapter / name).rename(tmp_path / "outside")
    (adapter / name).symlink_to(tmp_path / "outside")
    with pytest.raises(AdapterError, match=name) as caught:
        read_adapter(adapter, spec)
    assert caught.value.code == "path_refused"


def test_a_link_inside_the_adapter_is_followed(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "adapter", plain_config(), plain_tensors(dims))
    (adapter / WEIGHTS).rename(adapter / "blob")
    (adapter / WEIGHTS).symlink_to("blob")
    assert read_adapter(adapter, spec).applied == 14


@pytest.mark.parametrize("name", ["adapter_config.json", WEIGHTS])
def test_what_is_no_regular_file_is_refused(
    name: str, dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path, plain_config(), plain_tensors(dims))
    (adapter / name).unlink()
    os.mkfifo(adapter / name)  # opening it would wait for ever
    with pytest.raises(AdapterError, match="regular file"):
        read_adapter(adapter, spec)


def test_an_unreadable_file_is_an_adapter_error(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path, plain_config(), plain_tensors(dims))

    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(AdapterError, match="Permission denied") as caught:
        read_adapter(adapter, spec)
    assert caught.value.code == "unreadable"


class TestPaths:
    def test_an_operator_may_name_any_directory(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path)
        assert resolve_adapter_path(tmp_path / "link") == tmp_path.resolve()

    @pytest.mark.parametrize(
        "path", ["", "  ", "a\0b", "org/name-on-a-hub", "x" * 5000, "~", "~/adapter"]
    )
    def test_what_is_no_local_directory_is_refused(
        self, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        with pytest.raises(AdapterError) as caught:
            resolve_adapter_path(path)
        assert caught.value.code == "path_refused"

    @pytest.mark.parametrize(
        "path",
        [
            "../secret",
            "good/../../secret",
            "/",
            "~",
            "~root",
            "a/~",
            "out",
            "out/deeper",
            "loop",
            "..",
        ],
    )
    def test_nothing_leads_out_of_a_root(self, path: str, tmp_path: Path) -> None:
        root = tmp_path / "root"
        (root / "good").mkdir(parents=True)
        (tmp_path / "secret" / "deeper").mkdir(parents=True)
        (root / "out").symlink_to(tmp_path / "secret")
        (root / "loop").symlink_to("loop")
        with pytest.raises(AdapterError) as caught:
            resolve_adapter_path(path, root)
        assert caught.value.code == "path_refused"
        with pytest.raises(AdapterError):
            resolve_adapter_path(tmp_path / "secret", root)

    def test_inside_a_root_names_and_links_are_followed(self, tmp_path: Path) -> None:
        (tmp_path / "good").mkdir()
        (tmp_path / "alias").symlink_to("good")
        for name in ("good", "alias", "./good"):
            assert resolve_adapter_path(name, tmp_path) == (tmp_path / "good").resolve()
        assert resolve_adapter_path(".", tmp_path) == tmp_path.resolve()
