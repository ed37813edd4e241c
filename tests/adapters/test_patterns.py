"""Patterns of a config match as PEFT's do, and none of them can hold up the service."""

import re
from pathlib import Path

import pytest

from sharding import ModelDims
from tests.adapters.writing import plain_config, plain_tensors, write_adapter
from tp_engine.adapters import AdapterError, read_adapter
from tp_engine.adapters.config import parse_config
from tp_engine.adapters.patterns import match_start, matches_whole, pattern_fault
from tp_engine.adapters.targets import ending, in_list, module_names
from tp_engine.models.spec import ModelSpec

PATTERNS = [
    r".*\.(q|v)_proj",
    r"q_proj|v_proj",
    r"model\.layers\.(0|1[0-9])\..*",
    r"^(?!.*mlp).*_proj$",
    r"(?i:MODEL)\.layers\.\d+\.self_attn\.\w+",
    r".*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?",
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:mlp)\.(?:(?:gate_proj|up_proj)))",
    r"[a-z._0-9]*?o_proj(?<=o_proj)",
    r"(m)odel.*\.(?P<end>k_proj)",
    r"",
    r"layers",
    r"model\.layers\.\d\.",
]
ENDLESS = r"(.+?)+(?=\d)\1"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_what_python_itself_matches(pattern: str) -> None:
    assert pattern_fault(pattern) == ""
    for name in (*module_names(12), "lm_head", "model.embed_tokens"):
        assert matches_whole(pattern, name) == (re.fullmatch(pattern, name) is not None)
        for expression in (pattern, ending(pattern), in_list(pattern)):
            wanted, found = re.match(expression, name), match_start(expression, name)
            assert (wanted and wanted.span()) == (found and found.span())


def test_what_is_no_expression_is_told() -> None:
    for pattern in ("(", "a{2,1}", "[z-a]", "(?P<x>a)(?P<x>b)", "(?:" * 900 + ")" * 900):
        assert pattern_fault(pattern)


def test_a_name_that_breaks_the_expression_around_it_is_refused(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path
) -> None:
    config = plain_config(modules_to_save=["lm_head\\"])
    with pytest.raises(AdapterError, match=r"adapter_config\.json: pattern") as refused:
        read_adapter(write_adapter(tmp_path, config, plain_tensors(dims)), spec)
    assert refused.value.code == "config_invalid"


def test_what_two_libraries_read_in_two_ways_is_refused() -> None:
    assert re.fullmatch("(?:q_proj){e<=1}", "k_proj") is None, "others would allow for an error"
    for pattern in ("(?:q_proj){e<=1}", "[[:alpha:]_]+", r"\{x\}"):
        assert pattern_fault(pattern)


def test_counts_are_not_written_out_without_end() -> None:
    assert pattern_fault(r"layers\.[0-9]{1,2}\.(\w{2,}){,3}") == ""
    for pattern in ("a{99999999}", "(a{60000}){60000}", "(" + "a" * 4000 + "){1000}"):
        assert "spelt out" in pattern_fault(pattern)


def test_a_pattern_that_takes_years_is_refused_by_name(
    dims: ModelDims, spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tp_engine.adapters.patterns.MATCH_SECONDS", 0.05)
    config = plain_config(target_modules=ENDLESS)
    with pytest.raises(AdapterError, match="it takes more than") as refused:
        read_adapter(write_adapter(tmp_path, config, plain_tensors(dims)), spec)
    assert refused.value.code == "config_unsupported" and repr(ENDLESS) in str(refused.value)
    settings = parse_config(plain_config(rank_pattern={ENDLESS: 2}))
    with pytest.raises(AdapterError, match="it takes more than"):
        settings.rank_of("model.layers.0.self_attn.q_proj")
