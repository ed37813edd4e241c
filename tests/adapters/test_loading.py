from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sharding import ModelDims
from tests.adapters.writing import name_of, plain_config, plain_tensors, write_adapter
from tp_engine.adapters import AdapterError, AdapterLoadError, load_adapters
from tp_engine.models.spec import ModelSpec

BASES = ("base",)


@pytest.fixture
def good(dims: ModelDims, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "good", plain_config(), plain_tensors(dims))


@pytest.fixture
def bad(dims: ModelDims, tmp_path: Path) -> Path:
    tensors = plain_tensors(dims) | {name_of(0, "q_proj", "A"): torch.ones(9, 64)}
    return write_adapter(tmp_path / "bad", plain_config(), tensors)


def test_a_bad_adapter_does_not_block_a_good_one(good: Path, bad: Path, spec: ModelSpec) -> None:
    specs = [("bad", str(bad)), ("good", str(good)), ("gone", str(good / "nowhere"))]
    registry, reports = load_adapters(specs, None, spec, "skip", base_names=BASES)
    assert list(registry.adapters) == ["good"]
    assert [report.name for report in reports] == ["bad", "good", "gone"]
    assert [report.error and report.error.code for report in reports] == [
        "shape_mismatch",
        None,
        "path_refused",
    ]
    assert (reports[1].applied, reports[1].expected) == (14, 14)
    assert reports[1].digest == registry.adapters["good"].digest and reports[0].digest is None
    assert all(report.seconds >= 0 for report in reports)
    assert "14 of 14" in str(reports[1]) and "[9, 64]" in str(reports[0])


def test_fail_names_every_refused_adapter(good: Path, bad: Path, spec: ModelSpec) -> None:
    specs = [("bad", str(bad)), ("good", str(good)), ("gone", str(good / "nowhere"))]
    with pytest.raises(AdapterLoadError) as caught:
        load_adapters(specs, None, spec, "fail", base_names=BASES)
    assert [report.name for report in caught.value.reports] == ["bad", "gone"]
    assert "[9, 64]" in str(caught.value) and "nowhere" in str(caught.value)


def test_fail_is_content_with_good_adapters(good: Path, spec: ModelSpec) -> None:
    registry, _ = load_adapters([("x", str(good))], None, spec, "fail", base_names=BASES)
    assert registry.resolve("base:x").revision is registry.adapters["x"]


def test_a_directory_of_adapters_is_loaded_by_name(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    for name in ("b", "a", ".hidden", "base"):
        write_adapter(root / name, plain_config(), plain_tensors(dims))
    (root / "README.md").write_text("not an adapter")
    (root / "empty").mkdir()
    outside = write_adapter(tmp_path / "outside", plain_config(), plain_tensors(dims))
    (root / "leak").symlink_to(outside)
    (root / "alias").symlink_to("a")
    registry, reports = load_adapters([], str(root), spec, "skip", base_names=BASES)
    assert list(registry.adapters) == ["a", "alias", "b"]
    assert {r.name: r.error.code for r in reports if r.error} == {
        "base": "name_refused",
        "empty": "config_missing",
        "leak": "path_refused",
    }


def test_a_name_is_given_once(good: Path, spec: ModelSpec) -> None:
    specs = [("good", str(good)), ("good", str(good)), ("base", str(good)), ("", str(good))]
    registry, reports = load_adapters(specs, str(good.parent), spec, "skip", base_names=BASES)
    codes = [report.error and report.error.code for report in reports]
    assert codes == [None, "name_refused", "name_refused", "name_refused", "name_refused"]
    assert list(registry.adapters) == ["good"]


def test_a_missing_directory_of_adapters_fails(spec: ModelSpec, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="nowhere"):
        load_adapters([], str(tmp_path / "nowhere"), spec, "skip", base_names=BASES)


def test_an_unreadable_directory_of_adapters_is_an_adapter_error(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", deny)
    with pytest.raises(AdapterError, match="Permission denied"):
        load_adapters([], str(tmp_path), spec, "skip", base_names=BASES)


def test_warnings_are_reported(dims: ModelDims, spec: ModelSpec, tmp_path: Path) -> None:
    config = plain_config(base_model_name_or_path="org/other")
    adapter = write_adapter(tmp_path, config, plain_tensors(dims))
    _, (report,) = load_adapters([("x", str(adapter))], None, spec, "fail", base_names=BASES)
    assert "org/other" in report.warnings[0]
