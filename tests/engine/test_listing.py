"""What operators are told of adapters: filtered, in pages, and of those that are not served too."""

from pathlib import Path
from typing import Any

from tests.engine.fleet_world import World, known, world_at
from tp_engine.messages import AdapterList, DrainAdapter, ListAdapters, UnloadAdapter


def names(world: World, **fields: Any) -> list[str]:
    answer = world.until_answered(*world.begin(ListAdapters, **fields))
    assert isinstance(answer, AdapterList)
    return [each.name for each in answer.adapters]


def test_the_list_is_filtered_before_it_is_cut_into_pages(tmp_path: Path) -> None:
    with world_at(tmp_path) as world:
        for name in ("team/a", "team/b", "team/c", "other"):
            world.load(name, "good-2")
        world.do(DrainAdapter, name="team/b", seconds=0.0, remove=False)
        world.settle()
        assert names(world) == ["other", "team/a", "team/b", "team/c"]
        assert names(world, prefix="team/") == ["team/a", "team/b", "team/c"]
        assert names(world, prefix="team/", state="ready", limit=1) == ["team/a"]
        assert names(world, prefix="team/", state="ready", after="team/a") == ["team/c"]
        assert names(world, state="draining") == ["team/b"]
        assert names(world, state="failed") == []
        assert names(world, base="ba", limit=2) == ["other", "team/a"]
        assert names(world, base="another") == []
        assert world.show("team/b").state == "draining"


def test_without_a_store_all_are_of_the_served_base(tmp_path: Path) -> None:
    world = World(tmp_path, store=None)
    world.load("x", "good-2")
    assert names(world, base="anything") == ["x"]
    world.fleet.close()


def test_what_is_left_out_after_a_restart_is_listed_and_can_go(tmp_path: Path) -> None:
    with world_at(tmp_path) as world:
        for name in ("x", "y", "z"):
            world.load(name, "good-2" if name == "z" else "good-3")
        store = world.store
        assert store is not None
        (store.directory("good-3") / "adapter_config.json").write_text("damaged!")
    with world_at(tmp_path) as world:
        assert known(world.engine) == ["good-2"] and names(world) == ["x", "y", "z"]
        assert names(world, state="failed") == ["x", "y"] and names(world, state="ready") == ["z"]
        shown = world.show("x")
        assert (shown.state, shown.revision, shown.pages) == ("failed", "good-3", 0)
        assert "is failed: its files have 68 bytes" in shown.reason and shown.manifest is not None
        seen = world.loader.left_out
        assert world.load("x", "good-3").code is None
        assert [*seen] == ["x", "y"], "another thread may be going through it"
        assert world.show("x").state == "ready"
        gone = world.do(UnloadAdapter, name="y")
        assert (gone.code, gone.revision) == (None, "good-3")
        assert names(world) == ["x", "z"]
        assert world.do(UnloadAdapter, name="y").code == "adapter_not_found"
    with world_at(tmp_path) as world:
        assert names(world) == ["x", "z"] and known(world.engine) == ["good-2", "good-3"]


def test_what_fits_no_longer_is_left_out_of_a_start(tmp_path: Path) -> None:
    with world_at(tmp_path) as world:
        world.load("big", "good-20")
        world.load("x", "good-2")
    with world_at(tmp_path, host_pages=10) as world:
        assert known(world.engine) == ["good-2"] and names(world) == ["big", "x"]
        shown = world.show("big")
        assert (shown.state, shown.revision) == ("failed", "good-20")
        assert "needs 20 pages of the hosts' memory, which has 10" in shown.reason
        assert world.do(UnloadAdapter, name="big").revision == "good-20"
        assert names(world) == ["x"]
