"""Options: three sources, one check, and every refusal says where it came from."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from launch.options import OptionError, Options, ServeConfig, read_options, resolved
from launch.options.fields import Option, all_options
from launch.options.read import read_options_or_exit
from tp_engine.config import (
    GIB,
    MIB,
    Bytes,
    ConfigError,
    EngineConfig,
    default_cpu_arena,
    literal_options,
    parse_size,
)

ROOT = Path(__file__).parents[2]
OPTIONS = {option.name: option for option in all_options()}
BASE = EngineConfig(model="org/base")


def other_value(option: Option) -> Any:
    """An allowed value that is not the default."""
    special: dict[str, Any] = {
        "max_num_batched_tokens": 4096,
        "adapter_memory_fraction": 0.25,
        "rank_timeout": 7.5,
        "num_pages": 77,
        "adapter_source": ("s3://bucket/team", "hf://org"),
        "allowed_origins": ("https://chat.example.org", "http://localhost:3000"),
    }
    if option.name in special:
        return special[option.name]
    if literal_options(option.hint):
        return next(value for value in literal_options(option.hint) if value != option.default)
    if option.pairs:
        return (("tone", "/adapters/tone"), ("law", "/adapters/law"))
    if option.many:
        return ("first", "second")
    if option.kind is bool:
        return not option.default
    if option.kind == Bytes:
        return 3 * MIB
    return {int: 65, float: 0.75, str: "some/text"}[option.kind]


def value_of(options: Options, option: Option) -> Any:
    config = options.config
    return getattr(config if option.owner is ServeConfig else config.engine, option.name)


def as_flags(option: Option, value: Any) -> list[str]:
    if option.kind is bool:
        return [option.flag if value else "--no-" + option.flag[2:]]
    if option.pairs:
        return list(itertools.chain(*([option.flag, "=".join(item)] for item in value)))
    return [option.flag, *(value if option.many else [str(value)])]


def as_text(option: Option, value: Any) -> str:
    if option.pairs:
        return ", ".join("=".join(item) for item in value)
    return ",".join(value) if option.many else str(value)


def as_yaml(option: Option, value: Any) -> Any:
    if option.pairs:
        return dict(value)
    return list(value) if option.many else value


def read(
    tmp_path: Path,
    flags: list[str] | None = None,
    environ: dict[str, str] | None = None,
    file: Any = None,
) -> Options:
    """Read options with a model given in the weakest source there is."""
    content = {"model": "org/base", **(file or {})}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return read_options(["--config", str(path), *(flags or [])], environ or {})


def refused(tmp_path: Path, **sources: Any) -> str:
    with pytest.raises(OptionError) as caught:
        read(tmp_path, **sources)
    return str(caught.value)


def test_every_field_is_an_option_once_with_a_help_text() -> None:
    fields = [field.name for field in dataclasses.fields(EngineConfig)]
    fields += [field.name for field in dataclasses.fields(ServeConfig) if field.name != "engine"]
    assert [option.name for option in all_options()] == fields
    assert len(OPTIONS) == len(fields)
    assert all(option.help.endswith(".") or ";" in option.help for option in all_options())


@pytest.mark.parametrize("name", OPTIONS)
def test_every_field_is_reached_by_flag_variable_and_file(tmp_path: Path, name: str) -> None:
    option, value = OPTIONS[name], other_value(OPTIONS[name])
    assert value != option.default
    by_flag = read(tmp_path, flags=as_flags(option, value))
    by_variable = read(tmp_path, environ={option.variable: as_text(option, value)})
    by_file = read(tmp_path, file={name: as_yaml(option, value)})
    assert [value_of(options, option) for options in (by_flag, by_variable, by_file)] == [value] * 3
    assert by_flag.config == by_variable.config == by_file.config
    assert by_flag.origins[name] == option.flag
    assert by_variable.origins[name] == option.variable
    assert by_file.origins[name] == f"{name} in {tmp_path / 'serve.yaml'}"


@pytest.mark.parametrize("present", list(itertools.product([False, True], repeat=3)))
def test_flag_wins_over_environment_over_file_over_default(
    tmp_path: Path, present: tuple[bool, bool, bool]
) -> None:
    flag, variable, file = present
    options = read(
        tmp_path,
        flags=["--port", "1001"] if flag else [],
        environ={"TP_ENGINE_PORT": "1002"} if variable else {},
        file={"port": 1003} if file else {},
    )
    expected = 1001 if flag else 1002 if variable else 1003 if file else 8000
    assert options.config.port == expected
    assert ("port" in options.origins) == any(present)


def test_config_file_may_be_named_by_the_environment_and_a_flag_wins(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"model: org/{name}")
    environ = {"TP_ENGINE_CONFIG": str(tmp_path / "a")}
    assert read_options([], environ).config.engine.model == "org/a"
    chosen = read_options(["--config", str(tmp_path / "b")], environ)
    assert chosen.config.engine.model == "org/b"


@pytest.mark.parametrize(
    ("sources", "origin"),
    [
        ({"flags": ["--port", "{}"]}, "--port"),
        ({"environ": {"TP_ENGINE_PORT": "{}"}}, "TP_ENGINE_PORT"),
        ({"file": {"port": "{}"}}, "port in "),
    ],
)
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("99999", "port=99999 is not allowed: a number from 1 to 65535"),
        ("80.5", "'80.5' is not a whole number"),
        ("", "'' is not a whole number"),
    ],
)
def test_the_same_check_and_text_whatever_the_source(
    tmp_path: Path, sources: Any, origin: str, text: str, complaint: str
) -> None:
    filled = json.loads(json.dumps(sources).replace("{}", text))
    message = refused(tmp_path, **filled)
    assert message.startswith(origin)
    assert message.endswith(": " + complaint)


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ({"port": True}, "port=True is not allowed: a whole number"),
        ({"port": None}, "port=None is not allowed: a whole number"),
        ({"port": [8000]}, "port=[8000] is not allowed: a whole number"),
        ({"port": 8000.0}, "port=8000.0 is not allowed: a whole number"),
        ({"host": 127}, "host=127 is not allowed: text"),
        ({"deterministic": "maybe"}, "'maybe' is not true or false"),
        ({"deterministic": 1}, "deterministic=1 is not allowed: true or false"),
        ({"served_model_name": [7]}, "served_model_name=(7,) is not allowed"),
        ({"lora": {"a": 7}}, "lora=(('a', 7),) is not allowed"),
        ({"lora": ["a"]}, "'a' is not NAME=PATH"),
        ({"dtype": "int8"}, "one of auto, float32, bfloat16, float16"),
        ({"quantize": "int8"}, "quantize='int8' is not allowed: one of nf4, none"),
        ({"max_body_bytes": "2 parsecs"}, "'2 parsecs' is not a size"),
    ],
)
def test_values_of_a_wrong_type_in_a_file_are_refused(
    tmp_path: Path, file: Any, complaint: str
) -> None:
    message = refused(tmp_path, file=file)
    assert complaint in message
    assert message.startswith(f"{next(iter(file))} in {tmp_path}")


def test_a_check_across_fields_names_the_source_of_the_field_it_refuses(tmp_path: Path) -> None:
    message = refused(
        tmp_path, flags=["--max-num-seqs", "600"], environ={"TP_ENGINE_MAX_NUM_BATCHED_TOKENS": "5"}
    )
    assert message.startswith("TP_ENGINE_MAX_NUM_BATCHED_TOKENS: max_num_batched_tokens=5 ")
    assert "600 (max_num_seqs)" in message


@pytest.mark.parametrize(
    ("sources", "complaint"),
    [
        ({"flags": ["--prot", "1"]}, "unknown flag --prot; did you mean --port?"),
        ({"flags": ["--max-model-length=5"]}, "--max-model-length; did you mean --max-model-len?"),
        ({"flags": ["--por", "1"]}, "unknown flag --por; did you mean --port?"),
        ({"flags": ["--zzzzzzzzz"]}, "unknown flag --zzzzzzzzz"),
        ({"flags": ["--nproc-per-node=2"]}, "--nproc-per-node is torchrun's: give it before"),
        ({"flags": ["--nproc_per_node", "2"]}, "--nproc_per_node is torchrun's: give it before"),
        ({"flags": ["org/model"]}, "unexpected argument 'org/model'"),
        ({"flags": ["--port"]}, "--port: expected one argument"),
        (
            {"environ": {"TP_ENGINE_QUANTISE": "nf4"}},
            "unknown environment variable TP_ENGINE_QUANTISE; did you mean TP_ENGINE_QUANTIZE?",
        ),
        ({"file": {"modle": "x"}}, "unknown key 'modle'; did you mean model?"),
        ({"file": {7: "x"}}, "unknown key 7"),
        ({"file": {"config": "x"}}, "unknown key 'config'"),
        ({"file": {"max-num-seqs": 1, "max_num_seqs": 2}}, "is there twice"),
    ],
)
def test_unknown_names_are_refused_with_a_near_match(
    tmp_path: Path, sources: Any, complaint: str
) -> None:
    assert complaint in refused(tmp_path, **sources)


def test_variables_that_are_not_options_are_left_alone(tmp_path: Path) -> None:
    environ = {
        "TP_ENGINE_CACHE": "/cache",
        "HOME": "/root",
        "TP_ENGINE_SERVICE_HOST": "10.0.0.1",
        "TP_ENGINE_SERVICE_PORT_HTTP": "8000",
        "TP_ENGINE_PORT": "tcp://10.0.0.1:8000",
        "TP_ENGINE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert read(tmp_path, environ=environ).config == ServeConfig(engine=BASE)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- model\n", "is not a mapping"),
        ("model: [", "can't be read"),
        ("model: a\nmodel: b\n", "key 'model' is there twice"),
        ("model: a\nlora: {x: /1, x: /2}\n", "key 'x' is there twice"),
        (b"\xff\xfe\x00", "can't be read"),
    ],
)
def test_a_broken_file_is_refused_by_name(
    tmp_path: Path, text: str | bytes, complaint: str
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(OptionError, match="configuration file") as caught:
        read_options(["--config", str(path)], {})
    assert complaint in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused_and_an_empty_one_is_not(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"nowhere\.yaml can't be read"):
        read_options(["--config", str(tmp_path / "nowhere.yaml")], {})
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    options = read_options(["--config", str(tmp_path / "empty.yaml"), "--model", "m"], {})
    assert options.config == ServeConfig(engine=EngineConfig(model="m"))


def test_the_model_is_required_and_the_message_names_all_three_ways() -> None:
    with pytest.raises(OptionError, match=r"--model, TP_ENGINE_MODEL, or model in the --config"):
        read_options([], {})


def test_none_undoes_a_value_of_a_weaker_source(tmp_path: Path) -> None:
    options = read(tmp_path, flags=["--max-model-len", "none"], file={"max_model_len": 99})
    assert options.config.engine.max_model_len is None


def test_lists_of_a_stronger_source_replace_those_of_a_weaker(tmp_path: Path) -> None:
    flags = ["--lora", "a=/x=y", "b=/b", "--lora", "c=/c,d"]
    options = read(tmp_path, flags=flags, file={"lora": ["z=/z"]})
    assert options.config.engine.lora == (("a", "/x=y"), ("b", "/b"), ("c", "/c,d"))
    assert read(tmp_path, file={"lora": "z=/z"}).config.engine.lora == (("z", "/z"),)


def test_resolved_names_every_field_and_the_origin_of_each_that_was_given(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("sk-very-secret")
    options = read(
        tmp_path, flags=["--api-key-file", str(key_file)], environ={"TP_ENGINE_SEED": "7"}
    )
    engine = options.config.engine.resolve(cuda=False, model_positions=2048)
    config = dataclasses.replace(options.config, engine=engine)
    lines = resolved(config, options.origins).splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(OPTIONS)
    assert f"  api_key_file = {key_file}  (--api-key-file)" in lines
    assert "  seed = 7  (TP_ENGINE_SEED)" in lines
    assert f"  model = org/base  (model in {tmp_path / 'serve.yaml'})" in lines
    assert "  max_model_len = 2048  (chosen at start)" in lines
    assert "  port = 8000" in lines
    assert "sk-very-secret" not in "\n".join(lines)


@pytest.mark.parametrize(
    ("key", "given", "rank"), [(None, None, 0), ("KEYS", None, 16), (None, 8, 8), ("KEYS", 0, 0)]
)
def test_a_start_prepares_for_adapters_where_they_can_come(
    key: str | None, given: int | None, rank: int
) -> None:
    engine = dataclasses.replace(BASE, max_lora_rank=given)
    assert ServeConfig(engine=engine, admin_key_file=key).expected_lora_rank == rank


def test_only_the_first_rank_of_a_host_prints_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, expected in (("0", "serve.py: error: unknown flag --x\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as caught:
            read_options_or_exit(["--x"])
        assert caught.value.code == 2
        assert capsys.readouterr().err == expected


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_answer_without_heavy_imports(flag: str) -> None:
    script = f"""
import sys
from launch.options import read_options
try:
    read_options(["{flag}"])
finally:
    heavy = {{"torch", "transformers", "numpy", "fastapi", "huggingface_hub"}} & set(sys.modules)
    print("heavy:", sorted(heavy))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("heavy: []\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shown = {"--help": ["--gpu-memory-utilization", "--no-deterministic", "TP_ENGINE_CONFIG"]}
    for text in shown.get(flag, [f"tp-engine {project['version']}\n"]):
        assert text in done.stdout


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("0", 0),
        ("2GiB", 2 * GIB),
        ("2g", 2 * GIB),
        (" 512 MiB ", 512 * MIB),
        ("1.5K", 1536),
        ("2GB", 2_000_000_000),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "2 GiBs", "1.2.3k", "0x10", "٣"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    "change",
    [
        {"model": " "},
        {"revision": ""},
        {"served_model_name": ("a", "a")},
        {"served_model_name": ("",)},
        {"served_model_name": ["a"]},
        {"dtype": "int8"},
        {"device": None},
        {"max_model_len": 1},
        {"max_num_seqs": 0},
        {"max_num_seqs": True},
        {"max_num_seqs": 2.0},
        {"max_num_batched_tokens": 63},
        {"gpu_memory_utilization": 0},
        {"gpu_memory_utilization": 1.01},
        {"gpu_memory_utilization": float("nan")},
        {"arena_bytes": 5},
        {"num_pages": 0},
        {"adapter_memory_fraction": -0.1},
        {"enable_prefix_caching": 1},
        {"seed": -1},
        {"seed": 2**63},
        {"rank_timeout": 0.9},
        {"rank_timeout": float("inf")},
        {"drain_timeout": -1},
        {"cpu_threads": 0},
        {"lora": (("a", "/a"), ("a", "/b"))},
        {"lora": (("", "/a"),)},
        {"lora": (("a", ""),)},
        {"lora": (("org/base", "/a"),)},
        {"lora": (("a", "/a", "/b"),)},
        {"lora_dir": ""},
        {"lora_on_error": "warn"},
    ],
)
def test_the_engine_refuses_values_out_of_range_naming_the_field(change: dict[str, Any]) -> None:
    (field,) = change
    with pytest.raises(ConfigError, match=f"^{field}=.* is not allowed: ") as caught:
        dataclasses.replace(BASE, **change)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"drain_timeout": -1.0}, "a number of seconds from 0"),
        ({"arena_bytes": 5}, "a number of bytes from 1048576"),
        ({"gpu_memory_utilization": 1.5}, "a number above 0 to 1"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, r"a number from 9 \(max_num_seqs\)"),
    ],
)
def test_what_is_allowed_is_said_in_words(change: dict[str, Any], allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"is not allowed: {allowed}$"):
        dataclasses.replace(BASE, **change)


@pytest.mark.parametrize(
    "origin",
    ["chat.example.org", "https://chat.example.org/", "https://a,https://b", "", "null", '["*"]'],
)
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"^allowed_origins=.* is not allowed: scheme://host"):
        ServeConfig(engine=BASE, allowed_origins=("http://localhost:3000", "*", origin))


def test_resolve_follows_the_device_and_keeps_what_was_asked_for() -> None:
    cpu = BASE.resolve(cuda=False, model_positions=2048)
    assert (cpu.device, cpu.dtype, cpu.max_model_len) == ("cpu", "float32", 2048)
    assert cpu.max_num_batched_tokens == 512
    gpu = BASE.resolve(cuda=True, model_positions=2048)
    assert (gpu.device, gpu.dtype, gpu.max_num_batched_tokens) == ("cuda", "bfloat16", 8192)
    wide = dataclasses.replace(BASE, device="cpu", max_num_seqs=600, max_model_len=100)
    asked = dataclasses.replace(wide, dtype="bfloat16").resolve(cuda=True, model_positions=2048)
    assert (asked.device, asked.dtype, asked.max_model_len) == ("cpu", "bfloat16", 100)
    assert asked.max_num_batched_tokens == 600
    assert asked.resolve(cuda=True, model_positions=2048) == asked


def test_resolve_refuses_what_the_host_or_the_model_lacks() -> None:
    with pytest.raises(ConfigError, match="no GPU is visible"):
        dataclasses.replace(BASE, device="cuda").resolve(cuda=False, model_positions=2048)
    with pytest.raises(ConfigError, match="backend='nccl' is not allowed: gloo or auto on the CPU"):
        dataclasses.replace(BASE, backend="nccl").resolve(cuda=False, model_positions=2048)
    with pytest.raises(ConfigError, match="max_model_len=4096 is not allowed: at most 2048"):
        dataclasses.replace(BASE, max_model_len=4096).resolve(cuda=False, model_positions=2048)


def test_the_arena_of_a_cpu_rank_is_a_share_of_free_memory_up_to_a_limit() -> None:
    assert default_cpu_arena(8 * GIB, 2) == 2 * GIB
    assert default_cpu_arena(8 * GIB, 3) == 8 * GIB // 6
    assert default_cpu_arena(900 * GIB, 2) == 4 * GIB


def test_literals_are_found_inside_optionals() -> None:
    assert literal_options(OPTIONS["quantize"].hint) == ("nf4",)
    assert literal_options(OPTIONS["max_model_len"].hint) == ()
    assert type(None) in get_args(OPTIONS["quantize"].hint)
