"""The tuner of the NF4 products, and the table that it writes."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from kernels.nf4 import tuned
from kernels.nf4.choice import as_config, as_wide_config
from kernels.nf4.few_choice import as_few_config
from launch.bench.nf4_candidates import candidates, few_candidates, wide_candidates
from launch.bench.nf4_table import write_table


def test_every_measured_configuration_is_tried_when_it_is_measured_again() -> None:
    for rows, _, values in tuned.TUNED:
        assert as_config(values) in candidates(rows)
    for rows, _, values in tuned.WIDE:
        assert as_wide_config(values) in wide_candidates(rows)
    for rows, _, values in tuned.FEW:
        assert as_few_config(values) in few_candidates(rows)


def test_a_table_of_nothing_new_is_the_table_that_is_there(tmp_path: Path) -> None:
    write_table([], tmp_path / "tuned.py")
    assert tuned.__file__ is not None
    assert (tmp_path / "tuned.py").read_text() == Path(tuned.__file__).read_text()
