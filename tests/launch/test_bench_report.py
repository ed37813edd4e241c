"""Reading results and laying them out; running the kernel benchmarks as one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from launch.bench import kernels, kernels_lora
from launch.bench.report import figures, main, read, table


def write(path: Path, *results: dict[str, object]) -> Path:
    lines = [json.dumps({"benchmark": "engine", **result}) for result in results]
    path.write_text("\n".join(["a line for people", *lines, "another"]))
    return path


def test_figures_are_all_numbers_by_their_path() -> None:
    result = {
        "decode": {"1x0": {"ms": 4.5}},
        "results": [{"shape": "o", "rows": 4, "us": 7.5, "ratio": 1.5}],
        "dtype": "bfloat16", "eager": False, "none": None, "options": ["--x"],
    }  # fmt: skip
    assert dict(figures(result)) == {
        "decode 1x0 ms": 4.5,
        "results o 4 us": 7.5,
        "results o 4 ratio": 1.5,
    }


def test_a_table_has_a_column_a_run_and_the_ratio(tmp_path: Path) -> None:
    before = write(tmp_path / "before.jsonl", {"a": 2.0, "b": 1, "environment": {"cores": 2}})
    after = write(tmp_path / "after.jsonl", {"a": 3.0, "c": 12345.6})
    assert table([*read(before), *read(after)]).splitlines() == [
        "| figure | before | after | last / first |",
        "| --- | --- | --- | --- |",
        "| a | 2 | 3 | 1.500 |",
        "| b | 1 |  |  |",
        "| c |  | 12,346 |  |",
    ]
    assert table(read(before)).splitlines()[0] == "| figure | before |"


def test_several_runs_of_a_file_are_told_apart(tmp_path: Path) -> None:
    runs = read(write(tmp_path / "x.jsonl", {"a": 1}, {"a": 2}))
    assert [run.label for run in runs] == ["x 1", "x 2"]


def test_a_file_without_results_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("nothing\n")
    with pytest.raises(ValueError, match="holds no results"):
        read(tmp_path / "empty")
    with pytest.raises(SystemExit, match="holds no results"):
        main([str(tmp_path / "empty")])


def test_each_benchmark_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "x.jsonl", {"a": 1.5})
    with path.open("a") as file:
        file.write('\n{"benchmark": "serve", "tokens_per_s": 9.5}\n')
    main([str(path)])
    printed = capsys.readouterr().out
    assert "## engine" in printed and "| a | 1.5 |" in printed
    assert "## serve" in printed and "| tokens_per_s | 9.5 |" in printed


def test_plots_are_drawn_where_matplotlib_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = write(tmp_path / "x.jsonl", {"a": {"ms": 1.5}, "b": {"ms": 2.5, "us": 1.0}})
    main([str(path), "--plots", str(tmp_path / "plots")])
    assert (tmp_path / "plots" / "engine.png").stat().st_size > 1000


def test_kernel_families_are_chosen_by_name() -> None:
    assert kernels.families("lora,nf4") == ["lora", "nf4"]
    with pytest.raises(argparse.ArgumentTypeError, match="'gemm' is none of nf4, lora, attention"):
        kernels.families("nf4,gemm")


def test_a_childs_results_are_taken_and_the_rest_passed_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = 'print(\'speed\'); print(\'{"benchmark": "x", "us": 1}\'); raise SystemExit(3)'
    (tmp_path / "made_up_bench.py").write_text(script)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert kernels.run("made_up_bench", []) == (3, {"benchmark": "x", "us": 1})
    assert capsys.readouterr().out == "speed\n"


def test_a_case_of_lora_kernels_that_failed_or_is_wrong_is_at_fault() -> None:
    assert kernels_lora.fault({"error": 0.001, "cold": 9.0}) is None
    assert kernels_lora.fault({"error": float("inf")}) == "WRONG: inf"
    assert kernels_lora.fault({"failed": "RuntimeError: no room"}) == "RuntimeError: no room"
