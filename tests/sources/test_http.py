"""Fetching over HTTP: whole and right, or not at all."""

import hashlib
import threading
from pathlib import Path

import httpx
import pytest

from tests.sources.web import CONFIG, WEIGHTS, Web, adapter_bytes
from tp_engine.sources import (
    AllowedSources,
    FetchArea,
    FetchCancelled,
    FetchLimits,
    FetchProgress,
    SourceError,
    fetch,
    open_source,
)
from tp_engine.sources.errors import SourceErrorCode

LIMITS = FetchLimits(max_bytes=10**6, attempts=3, pause=0.01, stall=5.0)


def bring(
    web: Web,
    area: FetchArea,
    path: str = "team/x",
    *,
    allow: str | None = None,
    limits: FetchLimits = LIMITS,
    progress: FetchProgress | None = None,
    sums: dict[str, str] | None = None,
) -> dict[str, bytes]:
    """Fetch as the server does; what lies in the claim then, which is given up."""
    allowed = AllowedSources([allow or f"{web.url}/team"])
    url = allowed.find(f"{web.url}/{path}")
    assert url is not None
    source, claim = open_source(url, allowed), area.claim(str(url))
    keep = True
    try:
        fetch(source, claim, limits, progress or FetchProgress(), sums or {})
        keep = False
        return {name: (claim.path / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    finally:
        claim.release(keep=keep)
        source.close()


def refused(code: SourceErrorCode, web: Web, area: FetchArea, **options: object) -> str:
    with pytest.raises(SourceError) as error:
        bring(web, area, **options)  # type: ignore[arg-type]
    assert error.value.code == code
    return str(error.value)


def test_what_comes_is_what_is_there(web: Web, area: FetchArea) -> None:
    progress = FetchProgress()
    assert bring(web, area, progress=progress) == adapter_bytes()
    assert progress.done == progress.total == sum(map(len, adapter_bytes().values()))
    assert not [*area.claims.iterdir()]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_goes_on_from_where_it_stood(
    ranges: bool, web: Web, area: FetchArea
) -> None:
    web.ranges = ranges
    whole = len(adapter_bytes()[CONFIG])
    web.break_after = [whole, 100_000, 120_000 if ranges else 150_000]
    progress = FetchProgress()
    assert bring(web, area, progress=progress) == adapter_bytes()
    assert progress.done == progress.total
    asked = [ranged for method, _, ranged in web.asked if method == "GET"]
    assert asked[:2] == [None, None] and asked[2] == "bytes=100000-"
    assert web.sent == whole + 300_000 + (0 if ranges else 250_000)


def test_a_fetch_that_failed_is_gone_on_with_by_the_next_one(web: Web, area: FetchArea) -> None:
    whole = len(adapter_bytes()[CONFIG])
    web.break_after = [whole, 200_000, 0, 0, 0]
    assert "without sending complete message body" in refused("source_failed", web, area)
    sent, progress = web.sent, FetchProgress()
    reopened = FetchArea(area.claims.parents[1])
    assert bring(web, reopened, progress=progress) == adapter_bytes()
    assert web.sent - sent == 100_000 and progress.done == progress.total


@pytest.mark.parametrize("when", ["between", "within"])
def test_content_that_changes_is_never_mixed(when: str, web: Web, area: FetchArea) -> None:
    new, changed = adapter_bytes(seed=1), threading.Event()

    def change(path: str) -> None:
        if not changed.is_set() and path.endswith(WEIGHTS):
            changed.set()
            web.files |= {f"team/x/{name}": data for name, data in new.items()}

    web.before_body = change
    if when == "within":
        web.break_after = [len(adapter_bytes()[CONFIG]), 100_000]
    assert bring(web, area) == new
    assert changed.is_set()


def test_content_that_never_stays_is_given_up(web: Web, area: FetchArea) -> None:
    seeds = iter(range(1, 100))

    def change(path: str) -> None:
        web.files["team/x/" + CONFIG] = adapter_bytes(seed=next(seeds))[CONFIG]

    web.before_body = change
    assert "again and again" in refused("source_changed", web, area)


def test_without_a_tag_a_broken_fetch_begins_anew(web: Web, area: FetchArea) -> None:
    web.tags = lambda data: None
    web.break_after = [len(adapter_bytes()[CONFIG]), 100_000]
    assert bring(web, area) == adapter_bytes()
    assert [ranged for _, _, ranged in web.asked] == [None] * len(web.asked)
    refusing = FetchLimits(max_bytes=10**6, attempts=1, pause=0.01)
    web.break_after = [len(adapter_bytes()[CONFIG]), 100_000, 100_000]
    refused("source_failed", web, area, limits=refusing)
    assert bring(web, area) == adapter_bytes()


def test_a_weak_tag_is_none(web: Web, area: FetchArea) -> None:
    web.tags = lambda data: 'W/"1"'
    web.break_after = [len(adapter_bytes()[CONFIG]), 100_000]
    assert bring(web, area) == adapter_bytes()
    assert not any(ranged for _, _, ranged in web.asked)


def test_a_busy_server_is_asked_again(web: Web, area: FetchArea) -> None:
    web.statuses = [503, 429]
    assert bring(web, area) == adapter_bytes()
    web.statuses = [500] * 3
    assert "answers 500" in refused("source_failed", web, area)


@pytest.mark.parametrize(
    ("status", "code"), [(404, "source_missing"), (403, "source_denied"), (400, "source_failed")]
)
def test_a_refusal_is_taken_at_once(
    status: int, code: SourceErrorCode, web: Web, area: FetchArea
) -> None:
    web.statuses = [status]
    assert f"adapter_config.json answers {status}" in refused(code, web, area)
    assert len(web.asked) == 1


def test_too_many_bytes_are_refused_before_any_comes(web: Web, area: FetchArea) -> None:
    limits = FetchLimits(max_bytes=299_999)
    text = refused("too_many_bytes", web, area, limits=limits)
    assert "--adapter-max-bytes is 299999" in text
    web.files["team/x/" + CONFIG] = b" " * (5 << 20)
    text = refused("too_many_bytes", web, area, limits=FetchLimits(max_bytes=10**9))
    assert "adapter_config.json has 5242880 bytes; at most 4194304 are allowed" in text
    assert web.sent == 0


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        ((0xFFFFFF0000003C).to_bytes(8, "little"), "has a header of 72057589742960700 bytes"),
        (
            (900_000).to_bytes(8, "little"),
            "a header of 900000 bytes, but 300000 bytes at most in all",
        ),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
    ],
)
def test_a_header_that_cannot_be_stops_the_fetch(
    start: bytes, reason: str, web: Web, area: FetchArea
) -> None:
    web.files["team/x/" + WEIGHTS] = start.ljust(300_000, b"x")
    web.gate.clear()  # the second half is never sent
    threading.Timer(0.3, web.gate.set).start()
    assert reason in refused("weights_corrupt", web, area)


def test_a_file_of_a_few_bytes_is_no_adapter(web: Web, area: FetchArea) -> None:
    web.files["team/x/" + WEIGHTS] = b"oops"
    assert "has 4 bytes, too few" in refused("weights_corrupt", web, area)


def test_a_wrong_sum_keeps_nothing(web: Web, area: FetchArea) -> None:
    sums = {WEIGHTS: "0" * 64}
    assert "must be 000" in refused("checksum_mismatch", web, area, sums=sums)
    right = {name: hashlib.sha256(data).hexdigest() for name, data in adapter_bytes().items()}
    assert bring(web, area, sums=right) == adapter_bytes()
    assert web.sent == 2 * 300_000 + len(adapter_bytes()[CONFIG])  # the config was right


@pytest.mark.parametrize(
    ("headers", "code", "reason"),
    [
        ({"Content-Length": ""}, "source_failed", "does not tell its length"),
        ({"Content-Encoding": "gzip"}, "source_failed", "comes encoded only"),
        ({"Content-Length": "400000"}, "source_failed", "complete message body"),
    ],
)
def test_a_server_that_says_what_is_not_so_is_refused(
    headers: dict[str, str], code: SourceErrorCode, reason: str, web: Web, area: FetchArea
) -> None:
    web.headers = headers
    assert reason in refused(code, web, area)


def test_a_range_of_something_else_is_not_taken(web: Web, area: FetchArea) -> None:
    web.break_after = [len(adapter_bytes()[CONFIG]), 100_000]
    web.headers = {"Content-Range": "bytes 5-299999/300000"}
    limits = FetchLimits(max_bytes=10**6, pause=0.01, restarts=1)
    text = refused("source_changed", web, area, limits=limits)
    assert "gives another range than asked for" in text


def test_a_redirect_is_followed_within_the_prefixes_only(web: Web, area: FetchArea) -> None:
    for name, data in adapter_bytes().items():
        web.files[f"secret/{name}"] = web.files[f"team/real/{name}"] = data
        web.redirects[f"team/moved/{name}"] = f"/team/real/{name}?signature=1"
        web.redirects[f"team/out/{name}"] = f"{web.url}/secret/{name}?signature=1"
        web.redirects[f"team/dots/{name}"] = f"/team/%2e%2e/secret/{name}"
        web.redirects[f"team/away/{name}"] = "https://127.0.0.1:1/team/x"
        web.redirects[f"team/file/{name}"] = "file:///etc/passwd"
        web.redirects[f"team/round/{name}"] = f"/team/round/{name}"
    assert bring(web, area, "team/moved") == adapter_bytes()
    for path in ("out", "dots", "away", "file"):
        text = refused("source_refused", web, area, path=f"team/{path}")
        assert "which is not below an --adapter-source" in text and "signature" not in text
    assert "redirects more than 5 times" in refused("source_failed", web, area, path="team/round")
    assert not any(path.startswith("secret") for _, path, _ in web.asked)


def test_a_server_that_trickles_is_left(web: Web, area: FetchArea) -> None:
    web.gate.clear()
    timer = threading.Timer(0.5, web.gate.set)
    timer.start()
    limits = FetchLimits(max_bytes=10**6, attempts=1, pause=0.01, stall=0.2)
    web.files["team/x/" + WEIGHTS] = adapter_bytes(size=60_000)[WEIGHTS]
    assert "bytes in 0.2 s" in refused("source_failed", web, area, limits=limits)


def test_a_cancelled_fetch_ends_and_can_be_taken_up(web: Web, area: FetchArea) -> None:
    web.gate.clear()
    progress = FetchProgress()

    def cancel() -> None:
        while progress.done < 100_000:
            threading.Event().wait(0.01)
        progress.cancelled.set()
        web.gate.set()

    web.gate.set()
    web.before_body = lambda path: web.gate.clear() if path.endswith(CONFIG) else None
    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(FetchCancelled):
        bring(web, area, progress=progress)
    thread.join()
    sent, web.before_body = web.sent, None
    assert bring(web, area) == adapter_bytes()
    assert web.sent - sent < 200_000


def test_no_server_is_told_so(web: Web, area: FetchArea, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise httpx.ConnectError("nobody listens")

    monkeypatch.setattr(httpx.Client, "stream", refuse)
    assert "nobody listens" in refused("source_failed", web, area)


def test_two_fetches_of_one_address_do_not_meet(web: Web, area: FetchArea) -> None:
    found: list[dict[str, bytes]] = []
    threads = [threading.Thread(target=lambda: found.append(bring(web, area))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [adapter_bytes()] * 4
    assert not [*area.claims.iterdir()]


def test_a_head_without_a_length_is_no_answer(web: Web, area: FetchArea) -> None:
    web.head_length = False
    assert bring(web, area) == adapter_bytes()
    assert [method for method, _, _ in web.asked].count("GET") == 2 + 2 + 2


def test_a_bounded_number_of_rests_is_kept(
    web: Web, area: FetchArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tp_engine.sources.area.MAX_IDLE", 2)
    for name, data in adapter_bytes().items():
        web.files |= {f"team/{number}/{name}": data for number in range(3)}
    for number in range(3):
        web.break_after = [len(adapter_bytes()[CONFIG]), 100_000, 0, 0, 0]
        refused("source_failed", web, area, path=f"team/{number}")
    sent = web.sent
    assert bring(web, area, "team/2") == bring(web, area, "team/1") == adapter_bytes()
    assert web.sent - sent == 400_000
    assert bring(web, area, "team/0") == adapter_bytes()
    assert web.sent - sent == 700_000 + len(adapter_bytes()[CONFIG])


def test_an_unfinished_rest_is_kept_a_week(
    web: Web, area: FetchArea, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.break_after = [len(adapter_bytes()[CONFIG]), 100_000, 0, 0, 0]
    refused("source_failed", web, area)
    idle = area.claims.parent / "idle"
    assert len([*idle.iterdir()]) == 1
    FetchArea(tmp_path / "store")
    assert len([*idle.iterdir()]) == 1
    monkeypatch.setattr("tp_engine.sources.area.KEEP_SECONDS", -1.0)
    FetchArea(tmp_path / "store")
    assert not [*idle.iterdir()]
