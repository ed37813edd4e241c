"""Memory that is not given ends one load: what says so is known, and told to all ranks."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import DenseWeight, ops_for
from sharding import ModelDims, cut_model
from tests.adapters.writing import every_site, random_modules, revision_of
from tests.engine.fake import add_adapter, drive, make_engine, solo
from tests.engine.fleet_world import PARAMS, PROMPT, FakeLoader, World, known, world_at
from tests.engine.test_tiers import PARAMS as FEW
from tests.engine.test_tiers import Store, ask, know, settle
from tp_engine.adapters import AdapterRevision, pack_adapter, packing
from tp_engine.adapters.errors import OutOfMemory
from tp_engine.engine import Engine
from tp_engine.messages import AdapterReply, Failed, ListAdapters, PinAdapter, PreloadAdapter
from tp_engine.ranks.background import Background, Ended
from tp_engine.ranks.comm import Comm, Lane
from tp_engine.requests.admission import RequestError
from tp_engine.shortage import OneThread, asking_for
from tp_engine.tiers.gains import squared_norms

ROOT = Path(__file__).parents[2]
HUGE = 1 << 50
SHORTAGE = OutOfMemory("it on rank 1", 4096)


def of_torch() -> object:
    return torch.empty(HUGE, dtype=torch.uint8)


def of_python() -> object:
    return bytearray(HUGE)


def of_the_system() -> object:
    return mmap.mmap(-1, HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def of_a_gpu() -> object:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")


def of_pinned_memory() -> object:
    raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")


ASKERS = [of_torch, of_python, of_the_system, of_a_gpu, of_pinned_memory]


@pytest.mark.parametrize("ask_for", ASKERS)
def test_whatever_says_that_memory_is_not_given_is_one_error(ask_for: Callable[[], object]) -> None:
    wanted = rf"no memory for a test: {HUGE} bytes"
    with pytest.raises(OutOfMemory, match=wanted) as caught, asking_for("a test", HUGE):
        ask_for()
    assert (caught.value.code, caught.value.nbytes) == ("out_of_memory", HUGE)
    thread = OneThread("a-test")
    with pytest.raises(OutOfMemory, match=r"no memory for its files$"):
        thread.submit(ask_for).result(10)
    thread.shutdown()


@pytest.mark.parametrize(
    "fault",
    [AssertionError("x"), RuntimeError("x"), OSError(5, "x"), ValueError("x"), KeyError("x")],
    ids=repr,
)
def test_other_faults_pass_as_they_are(fault: Exception) -> None:
    with pytest.raises(type(fault)) as caught, asking_for("a test", 1):
        raise fault
    assert caught.value is fault


# --- the thread that reads and packs --------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with world_at(tmp_path) as world:
        yield world


def check_served(world: World) -> None:
    """The failed load left nothing, the service goes on, and the load works now."""
    world.settle()
    assert "x" not in world.registry.adapters and known(world.engine) == ["good-3"]
    assert world.store is not None and not world.store.has("good-2")
    assert world.load("x", "good-2").code is None
    for name in ("old", "x"):
        world.ask(name, name)
    assert world.run() == {
        "old": solo("good-3", PROMPT, PARAMS),
        "x": solo("good-2", PROMPT, PARAMS),
    }


@pytest.mark.parametrize("ask_for", ASKERS)
@pytest.mark.parametrize("where", ["read", "pack"])
def test_a_load_without_memory_fails_alone(
    where: str,
    ask_for: Callable[[], object],
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world.load("old", "good-3")
    with monkeypatch.context() as short:
        short.setattr(world.loader, where, lambda *of: ask_for())
        refused = world.load("x", "good-2")
    assert refused.code == "out_of_memory" and "adapter 'x': there is no memory" in refused.message
    check_served(world)


def test_a_load_that_another_rank_has_no_memory_for_fails_on_all(world: World) -> None:
    world.load("old", "good-3")
    world.worker.shortage = SHORTAGE
    refused = world.load("x", "good-2")
    assert refused.code == "out_of_memory"
    assert "adapter 'x'" in refused.message and "rank 1: 4096 bytes" in refused.message
    assert "good-2" not in world.worker.images.values(), "no rank has it"
    world.worker.shortage = None
    check_served(world)


def test_two_names_of_a_revision_without_memory_both_hear_of_it(world: World) -> None:
    world.worker.shortage = SHORTAGE
    world.loader.gate.clear()
    for name in ("x", "y"):
        assert world.begin_load(name, "good-2") == []
    world.loader.gate.set()
    codes = []
    while len(codes) < 2:
        codes += [getattr(reply, "code", "") for reply in world.turn()]
    assert codes == ["out_of_memory"] * 2
    world.worker.shortage = None
    assert world.load("x", "good-2").code is None


@pytest.mark.parametrize("ask_for", ASKERS)
def test_other_work_of_the_thread_fails_alone(
    ask_for: Callable[[], object], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.load("x", "good-2")
    world.push("z", "good-4")
    with monkeypatch.context() as short:
        for what in ("kept", "pin", "write_back", "discard"):
            short.setattr(world.loader, what, lambda *of, **options: ask_for())
        listed = world.until_answered(*world.begin(ListAdapters))
        assert isinstance(listed, AdapterReply) and listed.code == "out_of_memory"
        assert world.do(PinAdapter, name="x", pinned=True).code == "store_failed"
        assert "no memory" in world.flush().failed["z"]
        assert world.unload("x").code is None, "its files are left to the next start"
        world.settle()
    assert world.flush().written == ["z"]


def test_packing_says_how_many_bytes_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    dims = ModelDims(
        layers=1, hidden=24, intermediate=72, heads=3, kv_heads=3, head_dim=8, vocab=64
    )
    revision = revision_of(random_modules(dims, every_site(dims, 2)))
    cuts = cut_model(dims, 2)
    whole = pack_adapter(revision, cuts, dims, torch.float32, 4096)
    nbytes = sum(image.pages.nbytes for image in whole)
    monkeypatch.setattr(packing, "zeroed_pages", lambda *size: of_the_system())
    with pytest.raises(OutOfMemory, match=f"page images for 2 ranks: {nbytes} bytes"):
        pack_adapter(revision, cuts, dims, torch.float32, 4096)


# --- adapters that requests wait for --------------------------------------------------------------


def failures(engine: Engine) -> dict[str, str]:
    """Steps until nothing is open; messages of the requests that failed."""
    failed: dict[str, str] = {}
    while engine.requests:
        for output in engine.step():
            if isinstance(output, Failed):
                assert output.code == "adapter_unavailable"
                failed[output.request_id] = output.message
        assert engine.check_integrity() == []
    return failed


def test_requests_of_an_adapter_that_is_not_sent_fail_alone() -> None:
    engine, worker = make_engine(fetch=Store().fetch)
    know(engine, "x")
    for request_id, name in (("a", "x"), ("base", ""), ("b", "x")):
        ask(engine, request_id, name)
    worker.shortage = SHORTAGE
    failed = failures(engine)
    assert failed.keys() == {"a", "b"} and "rank 1: 4096 bytes" in failed["a"]
    assert not worker.images and engine.tiers.host.free == engine.tiers.host.num_pages
    worker.shortage = None
    ask(engine, "again", "x")
    assert drive(engine)["again"] == solo("x", PROMPT, FEW)


def test_requests_of_an_adapter_that_is_not_copied_fail_alone() -> None:
    engine, worker = make_engine()
    add_adapter(engine, "x")
    for request_id, name in (("a", "x"), ("base", "")):
        ask(engine, request_id, name)
    worker.shortage = SHORTAGE
    assert failures(engine).keys() == {"a"}
    assert engine.roster.is_warm("x") and not engine.residency.residents
    assert engine.stats().gauges["pages_adapters"] == 0
    worker.shortage = None
    ask(engine, "again", "x")
    assert drive(engine)["again"] == solo("x", PROMPT, FEW)


def test_an_adapter_that_nobody_waits_for_may_fail_to_come_and_be_asked_for_again() -> None:
    engine, worker = make_engine(fetch=Store().fetch)
    know(engine, "x")
    worker.shortage = SHORTAGE
    for _ in range(2):
        with pytest.raises(RequestError):
            ask(engine, "a", "x", wait=False)
        settle(engine)
    assert not engine.books.demand.is_wanted(engine.adapters["x"].handle)
    worker.shortage = None
    ask(engine, "a", "x")
    assert drive(engine)["a"] == solo("x", PROMPT, FEW)


def test_a_revision_may_go_while_a_host_finds_no_memory_for_it() -> None:
    engine, worker = make_engine(fetch=Store().fetch)
    know(engine, "x")
    ask(engine, "a", "x")
    worker.stopped, worker.shortage = True, SHORTAGE
    while not worker._under_way:
        engine.step()
    engine.abort("a")
    engine.unregister("x")
    worker.stopped = False
    settle(engine)
    engine.roster.adopt_delivered()
    assert not worker.images and engine.tiers.host.free == engine.tiers.host.num_pages
    assert engine.check_integrity() == []


@pytest.mark.parametrize("tier", ["host", "arena"])
def test_a_preload_without_memory_is_refused_and_ends(tier: str, tmp_path: Path) -> None:
    with world_at(tmp_path, host_pages=3) as world:
        for name in ("good-2", "good-3"):
            world.load(name, name)
        name = "good-2" if tier == "host" else "good-3"
        world.worker.shortage = SHORTAGE
        refused = world.do(PreloadAdapter, name=name, arena=tier == "arena")
        assert refused.code in ("unreadable", "no_room") and "server's log" in refused.message
        assert not world.fleet.busy
        world.worker.shortage = None
        assert world.do(PreloadAdapter, name=name, arena=tier == "arena").code is None


def test_a_start_without_memory_leaves_out_what_it_has_none_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world_at(tmp_path) as world:
        world.load("x", "good-2")
        world.load("y", "good-3")
    read = FakeLoader.read

    def short(self: FakeLoader, directory: Path) -> AdapterRevision:
        revision = read(self, directory)
        if revision.digest == "good-2":
            raise OutOfMemory("its tensors", 7)
        return revision

    monkeypatch.setattr(FakeLoader, "layout", "another")
    monkeypatch.setattr(FakeLoader, "read", short)
    with world_at(tmp_path) as world:
        assert [*world.registry.adapters] == ["y"]
        assert "7 bytes" in world.show("x").reason


def test_what_is_handed_out_at_the_start_may_find_no_memory() -> None:
    engine, worker = make_engine()
    worker.shortage = SHORTAGE
    with pytest.raises(OutOfMemory, match="on rank 1"):
        add_adapter(engine, "x")
    assert not engine.adapters and not worker.images
    worker.shortage = None
    add_adapter(engine, "x")
    ask(engine, "a", "x")
    assert drive(engine)["a"] == solo("x", PROMPT, FEW)


# --- the lanes of a rank --------------------------------------------------------------------------


def ended(lane: Background[Any]) -> Ended:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if found := lane.finished():
            return found[0]
        time.sleep(0.001)
    raise AssertionError("nothing has ended")


def test_a_lane_goes_on_after_work_without_memory() -> None:
    def work(ask_for: Callable[[], object]) -> None:
        assert lane.together("a part", 11, ask_for) == "whole"

    lane = Background[Callable[[], object]](
        Comm.alone(torch.device("cpu")), Lane.DELIVERY, lambda job: work(job)
    )
    for number, ask_for in enumerate(ASKERS):
        lane.begin(number, ask_for)
        done = ended(lane)
        assert done.number == number and done.shortage is not None
        assert "rank 0: 11 bytes" in str(done.shortage)
    lane.begin(9, lambda: "whole")
    assert ended(lane) == (9, None)


@pytest.mark.slow
def test_on_two_ranks_a_shortage_of_either_is_one_of_both() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", "-m", "tests.engine.short_ranks"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split("\n")[:-1] == [
        f"{where} on rank {rank}: told, gone, and there at the next try"
        for where in ("room", "gains", "keeping")
        for rank in (0, 1)
    ]


@pytest.mark.gpu
def test_a_gpu_that_gives_no_memory_ends_one_piece_of_work() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ops, generator = ops_for(device), torch.Generator().manual_seed(0)
    weight, a, b = (
        torch.randn(shape, generator=generator) for shape in ((2048, 2048), (4, 2048), (2048, 4))
    )
    wanted = squared_norms(DenseWeight(weight=weight), 0, a, b, 0.5, ops_for(torch.device("cpu")))
    on_gpu = DenseWeight(weight=weight.to(device))
    found: list[torch.Tensor] = []

    def norms() -> torch.Tensor:
        return squared_norms(on_gpu, 0, a.to(device), b.to(device), 0.5, ops)

    lane = Background[int](
        Comm.alone(device),
        Lane.DELIVERY,
        lambda job: found.append(lane.together("norms", 99, norms)),
    )
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0)
    try:
        lane.begin(1, 0)
        assert "rank 0: 99 bytes" in str(ended(lane).shortage)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    lane.begin(2, 0)
    assert ended(lane) == (2, None)
    torch.testing.assert_close(found[0], wanted, rtol=1e-12, atol=0)
