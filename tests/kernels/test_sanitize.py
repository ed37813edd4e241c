"""What `sanitize.py` makes of the tool's output."""

import pytest

from tests.kernels.sanitize import ERRORS_FOUND, SHOWN, hand_over, judge, shortened

FIRST, CALL = hand_over("nf4_wide")
READ = f"Read access at nf4_wide+0x150 in {FIRST}"
WRITES = [f"Write access at nf4_wide+0x20c0 in {FIRST}", f"Write access at nf4_wide+0x7 in {CALL}"]
PASSED = "2 passed, 56 deselected in 10.88s\n"


def report(*accesses: str) -> str:
    """As the tool prints one race."""
    first, *others = accesses
    lines = [f"Error: Race reported between {first}"]
    lines += [f"    and {access} [21 hazards]" for access in others]
    return "".join(f"========= {line}\n" for line in [*lines, ""])


def output(*reports: str, ends: str = PASSED, total: int | None = None) -> str:
    """As a process prints what was found, with the number of errors in all."""
    found = len(reports) if total is None else total
    summary = f"{len(reports)} hazards displayed ({found} errors, 0 warnings)"
    return f"{''.join(reports)}{ends}========= RACECHECK SUMMARY: {summary}\n"


def test_reports_of_a_hand_over_are_counted_and_let_through() -> None:
    both, one = report(READ, *WRITES), report(WRITES[1], READ)
    assert judge(ERRORS_FOUND, output(both, one, f".{both}")) == (True, 3)
    assert judge(0, output()) == (True, 0)


@pytest.mark.parametrize(
    "accesses",
    [
        (READ, WRITES[0].replace("nf4_wide", "nf4_few")),
        (READ, WRITES[0].replace(FIRST, f"{FIRST}0")),
        (READ, *WRITES, "Write access at nf4_wide+0x30 in wide_output.py:36"),
        (READ, *WRITES, "Write access at void other<int>(int)+0x30"),
        (READ.replace(FIRST, CALL), *WRITES),
        tuple(WRITES),
    ],
)
def test_any_other_race_is_an_error(accesses: tuple[str, ...]) -> None:
    known, other = report(READ, *WRITES), report(*accesses)
    assert judge(ERRORS_FOUND, output(known, other)) == (False, 1)
    assert accesses[-1] in shortened(output(known, other))
    assert READ not in shortened(output(known))


def test_reports_that_are_not_printed_are_errors() -> None:
    known = report(READ, *WRITES)
    assert judge(ERRORS_FOUND, output(known, total=2)) == (False, 1)
    assert judge(ERRORS_FOUND, known + PASSED) == (False, 1)


@pytest.mark.parametrize("ends", ["1 failed, 1 passed in 3.00s\n", "2 skipped in 0.02s\n", ""])
def test_tests_that_did_not_pass_are_not_clean(ends: str) -> None:
    known = report(READ, *WRITES)
    assert judge(ERRORS_FOUND, output(known, ends=ends)) == (False, 1)
    assert not judge(0, output(ends=ends))[0]


def test_other_errors_of_the_tool_are_errors() -> None:
    assert judge(ERRORS_FOUND, f"{PASSED}========= ERROR SUMMARY: 3 errors\n") == (False, 0)


def test_no_more_than_some_races_are_printed() -> None:
    races = [report(READ, f"Write access at k+0x{i} in k.py:{i}") for i in range(2 * SHOWN)]
    assert shortened(output(*races)).count("Race reported") == SHOWN
