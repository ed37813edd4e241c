"""Reading a model directory lazily."""

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from sharding import Checkpoint, CheckpointError, Span

SIGNALLING_NAN = torch.tensor([0x7F800001, -0x007FFFFF], dtype=torch.int32)


def make(path: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    path.mkdir(exist_ok=True)
    safetensors.torch.save_file(tensors, path / name)
    return path


def make_sharded(path: Path, files: dict[str, dict[str, torch.Tensor]]) -> Path:
    for file, tensors in files.items():
        make(path, tensors, file)
    write_index(path, {name: file for file, tensors in files.items() for name in tensors})
    return path


def write_index(path: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pad", [1, 2, 3])
def test_reads_equal_safetensors_at_any_alignment(
    dtype: torch.dtype, pad: int, tmp_path: Path
) -> None:
    values = torch.randint(0, 2, (7, 5)).to(dtype)
    make(tmp_path, {"a": torch.zeros(pad, dtype=torch.uint8), "b": values})
    with Checkpoint.open(tmp_path) as ckpt:
        assert torch.equal(ckpt.read("b"), values)
        assert ckpt.shape("b") == (7, 5)
        assert ckpt.dtype("b") == dtype


@pytest.mark.parametrize("rows", [Span(0, 7), Span(2, 5), Span(3, 3), Span(7, 7)])
@pytest.mark.parametrize("cols", [None, Span(0, 5), Span(1, 4), Span(2, 2)])
def test_a_slice_equals_the_slice_of_the_whole(
    rows: Span, cols: Span | None, tmp_path: Path
) -> None:
    values = torch.randn(7, 5, dtype=torch.bfloat16)
    make(tmp_path, {"a": values})
    with Checkpoint.open(tmp_path) as ckpt:
        part = ckpt.read_slice("a", rows, cols)
    expected = values[rows.slice] if cols is None else values[rows.slice, cols.slice]
    assert part.shape == expected.shape
    assert part.is_contiguous()
    assert torch.equal(part, expected)


def test_rows_of_vectors_and_of_empty_tensors_are_read(tmp_path: Path) -> None:
    make(tmp_path, {"bias": torch.arange(6.0), "none": torch.zeros(0, 4), "one": torch.ones(())})
    with Checkpoint.open(tmp_path) as ckpt:
        assert ckpt.read_slice("bias", Span(2, 4)).tolist() == [2.0, 3.0]
        assert ckpt.read_slice("none", Span(0, 0)).shape == (0, 4)
        assert ckpt.read("one").item() == 1.0


@pytest.mark.parametrize(
    ("name", "rows", "cols"),
    [
        ("a", Span(0, 8), None),
        ("a", Span(0, 7), Span(0, 6)),
        ("bias", Span(0, 3), Span(0, 1)),
        ("one", Span(0, 1), None),
    ],
)
def test_slices_that_leave_the_tensor_are_refused(
    name: str, rows: Span, cols: Span | None, tmp_path: Path
) -> None:
    make(tmp_path, {"a": torch.zeros(7, 5), "bias": torch.zeros(3), "one": torch.ones(())})
    with Checkpoint.open(tmp_path) as ckpt, pytest.raises(ValueError, match=f"{name}: "):
        ckpt.read_slice(name, rows, cols)


def test_no_bit_changes_on_the_way(tmp_path: Path) -> None:
    make(tmp_path, {"a": SIGNALLING_NAN.view(torch.float32).reshape(1, 2)})
    with Checkpoint.open(tmp_path) as ckpt:
        for read in (ckpt.read("a"), ckpt.read_slice("a", Span(0, 1), Span(0, 2))):
            assert torch.equal(read.view(torch.int32).flatten(), SIGNALLING_NAN)


def test_tensors_outlive_the_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, {"a": torch.arange(6.0).view(2, 3)})
    with Checkpoint.open(tmp_path) as ckpt:
        whole, part = ckpt.read("a"), ckpt.read_slice("a", Span(1, 2), Span(0, 2))
    assert whole.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert part.tolist() == [[3.0, 4.0]]
    with pytest.raises(ValueError, match="closed"):
        ckpt.read("a")


def test_a_file_that_is_cut_short_meanwhile_ends_the_read_alone(tmp_path: Path) -> None:
    path = make(tmp_path, {"a": torch.zeros(2**16), "b": torch.ones(2**16)}) / "model.safetensors"
    with Checkpoint.open(tmp_path) as ckpt:
        os.truncate(path, path.stat().st_size - 4)
        assert not ckpt.read("a").any()
        with pytest.raises(CheckpointError, match="cut short"):
            ckpt.read("b")


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    make(tmp_path, {"a": torch.zeros(4)})
    with Checkpoint.open(tmp_path) as ckpt:
        ckpt.read("a").fill_(1)
        assert ckpt.read("a").tolist() == [0.0] * 4


def test_leftovers_are_known(tmp_path: Path) -> None:
    make(tmp_path, {name: torch.zeros(2, 2) for name in "abcd"})
    with Checkpoint.open(tmp_path) as ckpt:
        assert list(ckpt.unread) == ["a", "b", "c", "d"]
        ckpt.read("a")
        ckpt.read_slice("c", Span(0, 0), Span(0, 0))  # a rank that holds nothing of it
        assert ckpt.shape("d") == (2, 2)
        assert list(ckpt.unread) == ["b", "d"]


def test_names_match_exactly(tmp_path: Path) -> None:
    make(tmp_path, {"qkv_proj.weight": torch.zeros(2)})
    with Checkpoint.open(tmp_path) as ckpt:
        assert "kv_proj.weight" not in ckpt
        with pytest.raises(CheckpointError, match=r"no tensor named 'kv_proj\.weight'"):
            ckpt.read("kv_proj.weight")


def test_files_of_an_index_are_one_checkpoint(tmp_path: Path) -> None:
    files = {
        "model-00001-of-00002.safetensors": {"a": torch.ones(2), "b": torch.ones(3)},
        "model-00002-of-00002.safetensors": {"c": torch.full((4,), 2.0)},
    }
    with Checkpoint.open(make_sharded(tmp_path, files)) as ckpt:
        assert ckpt.names == ("a", "b", "c")
        assert ckpt.read("c").tolist() == [2.0] * 4
        assert ckpt.unread == ("a", "b")


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "model.bin",
        "..",
        "",
        7,
        None,
    ],
)
def test_an_index_cannot_lead_out_of_its_directory(file: object, tmp_path: Path) -> None:
    inside = make(tmp_path / "inside", {}, "x.safetensors")
    make(tmp_path, {"a": torch.zeros(2)})
    write_index(inside, {"a": file})
    with pytest.raises(CheckpointError, match=r"weight_map\['a'\]"):
        Checkpoint.open(inside)


def test_an_index_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    make_sharded(tmp_path, {"x.safetensors": {"a": torch.zeros(2)}})
    write_index(tmp_path, {"a": "x.safetensors", "b": "x.safetensors"})
    with pytest.raises(CheckpointError, match="1 tensors are in no file, first 'b'"):
        Checkpoint.open(tmp_path)
    write_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    with pytest.raises(CheckpointError, match=r"y\.safetensors: no such file"):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    make_sharded(
        tmp_path,
        {
            "x.safetensors": {"a": torch.zeros(2)},
            "y.safetensors": {"a": torch.ones(2), "b": torch.ones(2)},
        },
    )
    write_index(tmp_path, {"a": "x.safetensors", "b": "y.safetensors"})
    with pytest.raises(CheckpointError, match=r"y\.safetensors: tensor 'a' is also in"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"{}", b'{"weight_map": []}'])
def test_an_index_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint.open(tmp_path)


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_pickled_weights_are_refused_and_nothing_in_them_runs(tmp_path: Path) -> None:
    torch.save({"a": Bomb(tmp_path / "boom")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        Checkpoint.open(tmp_path)
    assert not (tmp_path / "boom").exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "boom").exists()  # the bomb was live


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint.open(tmp_path / "nowhere")
