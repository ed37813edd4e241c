"""Nothing outside the operator's prefixes is an address that is asked for."""

from urllib.parse import unquote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tp_engine.sources import AllowedSources, SourceError

ALLOWED = AllowedSources(
    [
        "s3://bucket/team",
        "https://Host.example:443/adapters/",
        "http://127.0.0.1:9000",
        "http://[::1]:9000",
        "hf://org",
        "hf://other/one",
        "hf://third/pinned@v1",
    ]
)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/team",
        "s3://bucket/team/x/y/",
        "https://host.example/adapters/x",
        "https://HOST.example:443/adapters/a%20b",
        "http://127.0.0.1:9000/anything",
        "http://[::1]:9000/x",
        "hf://org/name",
        "hf://org/name@main/sub/folder",
        "hf://other/one@0123abc",
        "hf://third/pinned@v1/x",
    ],
)
def test_what_a_prefix_covers_is_an_address(text: str) -> None:
    url = ALLOWED.find(text)
    assert url is not None and str(url) == text.rstrip("/")


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/team-2/x",
        "s3://bucket/teams",
        "s3://bucket",
        "s3://Bucket/team/x",
        "s3://bucket/team/../other",
        "s3://bucket/team/%2e%2e/other",
        "s3://bucket/team/x%2f..%2f..",
        "s3://bucket//team/x",
        "s3://bucket/team//x",
        "s3://bucket/team/./x",
        "s3:///team/x",
        "https://host.example/adapters/x?versionId=1",
        "https://host.example/adapters/x#y",
        "https://host.example/adapters/x?",
        "https://user:word@host.example/adapters/x",
        "https://host.example@elsewhere.example/adapters/x",
        "https://elsewhere.example/adapters/x",
        "https://host.example:444/adapters/x",
        "https://host.example:99999/adapters/x",
        "https://host.example./adapters/x",
        "http://host.example/adapters/x",
        "http://127.0.0.1/x",
        "http://127.0.0.1:9000\\@elsewhere.example/x",
        "http://127.0.0.1:9000.elsewhere.example/x",
        "http://169.254.169.254/latest/meta-data",
        "hf://org",
        "hf://other/two",
        "hf://third/pinned",
        "hf://third/pinned@v2",
        "hf://org/name@a%2fb",
        "hf://org/@v1",
        "file:///etc/passwd",
        "memory://x",
        "ftp://host.example/adapters/x",
        "simplecache::s3://bucket/team/x",
        "://x",
        "s3://bucket/team/" + "x" * 3000,
        "s3://bucket/team/x\n",
        "s3://bucket/team/ü",
        "s3://bucket/te\0am",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(SourceError) as refused:
        ALLOWED.find(text)
    assert refused.value.code == "source_refused"
    assert "user:word" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ["/srv/adapters/x", "x", "../x", "~/x", "a/b/c", "nobody/knows", "", "other/two"]
)
def test_what_is_no_address_is_a_path(text: str) -> None:
    assert ALLOWED.find(text) is None


def test_a_hub_id_is_one_only_where_the_list_covers_it() -> None:
    assert str(ALLOWED.find("org/name")) == "hf://org/name"
    assert str(ALLOWED.find("other/one@v2")) == "hf://other/one@v2"
    assert AllowedSources([]).find("org/name") is None
    with pytest.raises(SourceError, match="not below an --adapter-source; there are: none"):
        AllowedSources([]).find("hf://org/name")


@pytest.mark.parametrize("prefix", ["", "/srv", "https://", "s3://", "file:///srv", "https://h?x"])
def test_a_prefix_that_is_no_address_is_refused(prefix: str) -> None:
    with pytest.raises(SourceError, match="is refused"):
        AllowedSources([prefix])


PIECES = st.sampled_from(
    [
        *("https", "http", "://", ":", "/", "//", "host.example", "127.0.0.1", "evil.example"),
        *("adapters", "..", ".", "%2e", "%2E", "%2f", "%5c", "\\", "@", "?", "#", ";", "443"),
        *("9000", "x", "[::1]"),
    ]
)


@given(st.lists(PIECES, max_size=10).map("".join), st.booleans())
def test_what_is_accepted_means_the_same_to_who_asks_for_it(text: str, whole: bool) -> None:
    text = text if whole else f"https://host.example/adapters{text}"
    try:
        url = ALLOWED.find(text)
    except SourceError:
        return
    if url is None:
        assert "://" not in text
        return
    asked = httpx.URL(f"{url}/adapter_config.json")
    port = {"https": 443, "http": 80}[asked.scheme] if asked.port is None else asked.port
    path = [unquote(part) for part in asked.raw_path.decode().split("/")[1:]]
    assert not {"", ".", ".."} & set(path) and not any("/" in part for part in path)
    place = (asked.scheme, asked.host, port)
    if place == ("https", "host.example", 443):
        assert path[0] == "adapters"
    else:
        assert place in [("http", "127.0.0.1", 9000), ("http", "::1", 9000)]
