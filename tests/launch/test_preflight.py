"""Preflight: every refusal says what is wrong, what was found and what to do."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.options import ServeConfig
from launch.preflight import (
    Gpu,
    MemoryNeed,
    PreflightError,
    check_distinct_gpus,
    check_driver,
    check_gpu,
    check_memory,
    check_model_directory,
    check_port,
    check_sources,
    claim_store,
    count_gpus,
    ensure_torchrun_environment,
    estimate_memory,
    query_gpu,
    start_warnings,
)
from launch.preflight.gpu import driver_version
from sharding import ModelDims
from tp_engine.config import GIB, EngineConfig
from tp_engine.tiers.host_memory import container_free_bytes, free_host_bytes

ROOT = Path(__file__).parents[2]


# -- port and host ------------------------------------------------------------------------------


def test_a_port_in_use_is_refused_and_a_free_one_is_left_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PreflightError, match=f"port {port} on 127.0.0.1 is in use.*--port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
    with socket.socket() as after:
        after.bind(("127.0.0.1", port))


def test_a_host_of_another_machine_is_refused() -> None:
    with pytest.raises(PreflightError, match=r"'192\.0\.2\.1' is not an address of this machine"):
        check_port("192.0.2.1", 8000)
    with pytest.raises(PreflightError, match=r"'no\.such\.invalid' can't be resolved"):
        check_port("no.such.invalid", 8000)


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [
        ("127.0.0.1", None, False),
        ("127.0.0.9", None, False),
        ("::1", None, False),
        ("localhost", None, False),
        ("0.0.0.0", None, True),
        ("::", None, True),
        ("10.1.2.3", None, True),
        ("gpu-box", None, True),
        ("0.0.0.0", "keys.txt", False),
    ],
)
def test_listening_wider_than_loopback_without_a_key_is_warned_of(
    host: str, key: str | None, warned: bool
) -> None:
    config = ServeConfig(engine=EngineConfig(model="m"), host=host, api_key_file=key)
    texts = start_warnings(config, torchrun=True)
    assert bool(texts) == warned
    assert all(host in text and "--api-key-file" in text for text in texts)


def test_calls_from_any_page_without_a_key_are_warned_of() -> None:
    config = ServeConfig(engine=EngineConfig(model="m"), allowed_origins=("*",))
    (text,) = start_warnings(config, torchrun=True)
    assert "--allowed-origins * without --api-key-file" in text
    for safe in ({"api_key_file": "keys"}, {"allowed_origins": ("http://localhost:3000",)}):
        assert start_warnings(dataclasses.replace(config, **safe), torchrun=True) == ()


def test_sources_that_nobody_may_use_or_that_are_not_there_are_warned_of(tmp_path: Path) -> None:
    config = ServeConfig(engine=EngineConfig(model="m"), adapter_root=(str(tmp_path),))
    (text,) = start_warnings(config, torchrun=True)
    assert "without --admin-key-file" in text and "--adapter-root" in text
    config = dataclasses.replace(config, admin_key_file="keys")
    assert start_warnings(config, torchrun=True) == ()
    config = dataclasses.replace(config, adapter_root=(str(tmp_path), "/no/such"))
    (text,) = start_warnings(config, torchrun=True)
    assert text.startswith("--adapter-root /no/such is no directory")


def test_draining_longer_than_torchrun_waits_is_warned_of() -> None:
    config = ServeConfig(engine=EngineConfig(model="m", drain_timeout=30))
    assert start_warnings(config, torchrun=False) == ()
    (text,) = start_warnings(config, torchrun=True)
    assert "--drain-timeout 30" in text


def test_another_package_named_kernels_is_refused_before_it_is_imported(tmp_path: Path) -> None:
    other = tmp_path / "kernels"
    other.mkdir()
    (other / "__init__.py").write_text("raise RuntimeError('imported')")
    script = "from launch.packages import check_kernels_package as check; check(); print('ours')"
    outputs = []
    for path in ([ROOT, tmp_path], [tmp_path, ROOT]):
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path / "kernels",
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
        )
        outputs.append(done.stdout + done.stderr)
    assert outputs[0] == "ours\n"
    assert f"ImportError: the import name 'kernels' leads to {other}" in outputs[1]
    assert "pip uninstall kernels" in outputs[1]


# -- model --------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The names that a complete sharded model directory has."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    names = [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    for name in names:
        (directory / name).write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[0]}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def refusal(directory: Path) -> str:
    with pytest.raises(PreflightError) as caught:
        check_model_directory(directory)
    return str(caught.value)


def test_a_complete_directory_passes_with_or_without_an_index(model: Path) -> None:
    check_model_directory(model)
    (model / "model.safetensors.index.json").unlink()
    check_model_directory(model)


def test_random_weights_need_no_files(model: Path) -> None:
    for path in model.glob("*.safetensors*"):
        path.unlink()
    assert "no weights at all" in refusal(model)
    check_model_directory(model, weights=False)


def test_what_is_missing_in_a_directory_is_named(model: Path) -> None:
    (model / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is listed in the index" in refusal(model)
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer (none of tokenizer.json, " in refusal(model)
    (model / "config.json").unlink()
    assert "has no config.json" in refusal(model)
    assert "is not a directory" in refusal(model / "tokenizer.json")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("pytorch_model.bin", "only pytorch_model.bin"),
        ("model.gguf", "only model.gguf"),
        (None, "no weights at all"),
    ],
)
def test_weights_in_other_formats_are_refused_by_name(
    model: Path, name: str | None, found: str
) -> None:
    for path in model.glob("model*"):
        path.unlink()
    if name is not None:
        (model / name).write_bytes(b"x")
    message = refusal(model)
    assert f"has no *.safetensors, {found}" in message
    assert "save_pretrained" in message


def test_a_git_lfs_pointer_is_recognised(model: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (model / "model-00001-of-00002.safetensors").write_text(pointer)
    assert "git lfs pull" in refusal(model)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}']
)
def test_a_broken_index_is_refused(model: Path, text: str) -> None:
    (model / "model.safetensors.index.json").write_text(text)
    assert "is not an index of safetensors files" in refusal(model)


# -- memory -------------------------------------------------------------------------------------

LLAMA_8B = ModelDims(
    layers=32, hidden=4096, intermediate=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256
)
LIMITS = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "max_num_seqs": 64}


def test_the_estimate_of_a_known_model_is_right() -> None:
    need = estimate_memory(
        LLAMA_8B, 1, element_bytes=2, nf4=False, dense_copies=False, tied=False, **LIMITS
    )
    # 8,030,261,248 parameters, 266,240 of them in norms, which the estimate leaves out.
    assert need.weights == 2 * (8_030_261_248 - 266_240)
    assert need.dense_copies == 0
    assert need.sequence == 8192 * 128 * 1024
    quantised = estimate_memory(
        LLAMA_8B, 1, element_bytes=2, nf4=True, dense_copies=False, tied=False, **LIMITS
    )
    linear, tables = 6_979_321_856, 2 * 128256 * 4096
    assert quantised.weights == linear * 9 // 16 + 2 * tables
    assert quantised.scratch - need.scratch == 2 * 2 * 14336 * 4096
    copied = estimate_memory(
        LLAMA_8B, 1, element_bytes=4, nf4=True, dense_copies=True, tied=True, **LIMITS
    )
    assert copied.dense_copies == 4 * (linear + LLAMA_8B.vocab * LLAMA_8B.hidden)
    assert copied.weights == linear * 9 // 16 + 2 * tables


@pytest.mark.parametrize("world", [2, 3, 8, 16])
def test_the_estimate_is_of_the_heaviest_rank(world: int) -> None:
    one, many = (
        estimate_memory(
            LLAMA_8B, ranks, element_bytes=2, nf4=False, dense_copies=True, tied=False, **LIMITS
        )
        for ranks in (1, world)
    )
    assert one.weights / world <= many.weights < 1.3 * one.weights / world
    assert many.sequence >= one.sequence / min(world, 8)


NEED = MemoryNeed(weights=6 * GIB, dense_copies=0, scratch=GIB, sequence=GIB)


def test_memory_that_suffices_to_the_byte_passes_and_one_byte_less_does_not() -> None:
    check_memory(NEED, 8 * GIB, arena_bytes=None, where="GPU 0", nf4=True)
    check_memory(NEED, 9 * GIB, arena_bytes=2 * GIB, where="GPU 0", nf4=True)
    with pytest.raises(PreflightError) as caught:
        check_memory(NEED, 8 * GIB - 1, arena_bytes=None, where="GPU 0", nf4=True)
    message = str(caught.value)
    assert message.startswith("about 8.00 GiB needed, 8.00 GiB available on GPU 0 (weights 6.00")
    assert "--max-model-len" in message
    assert "--quantize" not in message
    assert "--no-keep-dense" not in message


def test_the_advice_follows_what_takes_the_memory() -> None:
    need = dataclasses.replace(NEED, dense_copies=20 * GIB)
    with pytest.raises(PreflightError, match=r"--no-keep-dense, a smaller --arena-bytes"):
        check_memory(need, 8 * GIB, arena_bytes=3 * GIB, where="this host", nf4=True)
    with pytest.raises(PreflightError, match=r"try --quantize nf4, a smaller --max-model-len"):
        check_memory(NEED, GIB, arena_bytes=None, where="this host", nf4=False)


def test_a_container_limit_bounds_what_is_free(tmp_path: Path) -> None:
    assert container_free_bytes(tmp_path) == 2**63 - 1
    (tmp_path / "memory.max").write_text("max\n")
    assert container_free_bytes(tmp_path) == 2**63 - 1
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 150\n")
    assert container_free_bytes(tmp_path) == 450
    assert 0 < free_host_bytes() < 2**50


# -- ranks and GPUs -----------------------------------------------------------------------------


def test_without_torchrun_a_world_of_one_rank_is_set_up() -> None:
    environ = {"MASTER_ADDR": "some-other-host", "MASTER_PORT": "1"}
    place = ensure_torchrun_environment(environ)
    assert (place.rank, place.world, place.local_rank, place.local_world) == (0, 1, 0, 1)
    assert not place.torchrun
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert 1024 <= int(environ.pop("MASTER_PORT")) <= 65535
    del environ["MASTER_ADDR"]
    assert environ == {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def test_torchruns_environment_is_read_and_left_alone() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    before = dict(environ)
    place = ensure_torchrun_environment(environ)
    assert (place.rank, place.world, place.local_rank, place.local_world) == (5, 8, 1, 4)
    assert place.torchrun
    assert environ == before


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE set, but not LOCAL_RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=2 of WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK=-1 of WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0"}, "WORLD_SIZE='two' is not a whole"),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK=2 of LOCAL_WORLD_SIZE=2",
        ),
    ],
)
def test_a_half_set_or_impossible_environment_is_refused(
    environ: dict[str, str], complaint: str
) -> None:
    with pytest.raises(PreflightError, match=complaint):
        ensure_torchrun_environment(environ)


def test_two_ranks_on_one_gpu_are_refused_and_equal_numbers_on_two_hosts_are_not() -> None:
    check_distinct_gpus([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")])
    with pytest.raises(PreflightError, match="ranks 1 and 3 both use GPU GPU-2 of host a"):
        check_distinct_gpus([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1"), ("a", "GPU-2")])


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 3)])
def test_gpus_from_ampere_on_pass(capability: tuple[int, int]) -> None:
    check_gpu(Gpu(name="x", uuid="u", capability=capability, free_bytes=1, total_bytes=1))


@pytest.mark.parametrize("capability", [(7, 5), (7, 0), (6, 1)])
def test_older_gpus_are_refused_by_name(capability: tuple[int, int]) -> None:
    gpu = Gpu(name="Tesla T4", uuid="u", capability=capability, free_bytes=1, total_bytes=1)
    shown = "{}.{}".format(*capability)
    with pytest.raises(PreflightError, match=f"Tesla T4 has compute capability {shown}: 8.0 or"):
        check_gpu(gpu)


def test_a_driver_of_an_older_major_version_is_refused() -> None:
    check_driver((12, 2), (12, 8))
    check_driver((13, 0), (12, 8))
    check_driver(None, (12, 8))
    with pytest.raises(PreflightError, match=r"serves CUDA up to 12\.8, but torch .* for 13"):
        check_driver((12, 8), (13, 0))


def test_no_gpus_are_counted_for_the_cpu() -> None:
    assert count_gpus("cpu") == 0
    if torch.version.cuda is None:
        assert count_gpus("auto") == 0


@pytest.mark.gpu
def test_a_real_gpu_answers() -> None:
    assert count_gpus("auto") >= 1
    driver = driver_version()
    assert driver is not None
    assert driver >= (11, 0)
    gpu = query_gpu(0)
    check_gpu(gpu)
    assert gpu.name
    assert gpu.uuid
    assert 0 < gpu.free_bytes <= gpu.total_bytes


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"adapter_source": ("https://host/x",)}, "needs --adapter-store"),
        ({"adapter_source": ("s3://bucket/x",), "adapter_store": "store"}, "s3fs is not installed"),
    ],
)
def test_sources_that_cannot_be_fetched_from_are_refused_at_the_start(
    options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PreflightError, match=reason):
        check_sources(ServeConfig(engine=EngineConfig(model="m"), **options))
    others = ("https://host/x", "hf://org")
    config = EngineConfig(model="m")
    check_sources(ServeConfig(engine=config, adapter_source=others, adapter_store="store"))
    check_sources(ServeConfig(engine=config))


def test_a_store_has_one_server_at_a_time(tmp_path: Path) -> None:
    store = tmp_path / "not" / "there"
    with claim_store(store), pytest.raises(PreflightError, match="in use by another server"):
        claim_store(store)
    code = f"""
import os, signal
from pathlib import Path
from launch.preflight import claim_store
claim = claim_store(Path({str(store)!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120)
    assert killed.returncode < 0
    claim_store(store).close()
    (tmp_path / "file").touch()
    with pytest.raises(PreflightError, match=r"--adapter-store .*file can't be used"):
        claim_store(tmp_path / "file")
