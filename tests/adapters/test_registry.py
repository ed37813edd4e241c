from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch

from tests.adapters.writing import revision_of
from tp_engine.adapters import (
    AdapterError,
    AdapterRegistry,
    AdapterRevision,
    RevisionCard,
    UnknownModel,
)
from tp_engine.adapters.revision import LoraModule


def revision(seed: float = 1.0) -> RevisionCard:
    return RevisionCard.of(whole(seed))


def whole(seed: float = 1.0) -> AdapterRevision:
    module = LoraModule(a=torch.full((1, 4), seed), b=torch.ones(4, 1), scale=1.0)
    return revision_of({(0, 0): module})


def test_the_registry_keeps_no_tensors(registry: AdapterRegistry) -> None:
    content = whole()
    tensor = weakref.ref(content.modules[0, 0].a)
    registry.register("sql", content)
    assert registry.adapters["sql"] == RevisionCard.of(content)
    del content
    gc.collect()
    assert tensor() is None


def test_many_names_at_once_are_as_one_after_the_other(registry: AdapterRegistry) -> None:
    registry.register("first", revision(1))
    registry.register_all({"second": revision(2), "third": whole(3)})
    assert list(registry.adapters) == ["first", "second", "third"]
    assert registry.resolve("third").digest == revision(3).digest


@pytest.fixture
def registry() -> AdapterRegistry:
    return AdapterRegistry(("llama", "org/llama:8b"))


def test_base_names_mean_no_adapter(registry: AdapterRegistry) -> None:
    for name in registry.base_names:
        resolved = registry.resolve(name)
        assert (resolved.name, resolved.revision) == (name, None)


def test_every_form_means_the_same_revision(registry: AdapterRegistry) -> None:
    content = revision()
    registry.register("sql", content)
    for model in (
        "sql",
        "llama:sql",
        "org/llama:8b:sql",
        f"sql@{content.digest[:8]}",
        f"sql@{content.digest}",
        f"llama:sql@{content.digest[:12]}",
    ):
        resolved = registry.resolve(model)
        assert resolved.name == "sql" and resolved.revision is content


@pytest.mark.parametrize(
    "model",
    [
        "",
        " ",
        "nope",
        "sql ",
        "SQL",
        "llama:",
        "llama:nope",
        "other:sql",
        "llama:llama:sql",
        "llama:llama",
        "sql@",
        "sql@0000000",
        "sql@00000000",
        "nope@00000000",
        "llama@00000000",
        "/etc/passwd",
        "https://example.com/sql",
        "x" * 100_000,
        "\ud800",
        "\x00",
    ],
)
def test_what_is_not_registered_is_unknown(model: str, registry: AdapterRegistry) -> None:
    registry.register("sql", revision())
    with pytest.raises(UnknownModel) as caught:
        registry.resolve(model)
    assert caught.value.code == "model_not_found"
    assert len(str(caught.value)) < 400 and str(caught.value).isprintable()


def test_a_short_or_wrong_revision_is_unknown(registry: AdapterRegistry) -> None:
    content = revision()
    registry.register("sql", content)
    wrong = "0" if content.digest[8] != "0" else "1"
    for prefix in (content.digest[:7], content.digest[:8] + wrong, content.digest + "0"):
        with pytest.raises(UnknownModel):
            registry.resolve(f"sql@{prefix}")


def test_an_exact_name_wins_over_any_form(registry: AdapterRegistry) -> None:
    first, second = revision(1.0), revision(2.0)
    registry.register("a:b@1", first)
    registry.register("b@1", second)
    assert registry.resolve("a:b@1").revision is first
    assert registry.resolve("llama:b@1").revision is second
    assert registry.resolve("llama:a:b@1").revision is first


def test_similar_names_stay_different(registry: AdapterRegistry) -> None:
    contents = {name: revision(i) for i, name in enumerate(("a/b", "a-b", "a_b", "A/b"))}
    for name, content in contents.items():
        registry.register(name, content)
    assert {name: registry.resolve(name).revision for name in contents} == contents


def test_a_taken_name_is_refused_and_keeps_its_revision(registry: AdapterRegistry) -> None:
    content = revision()
    assert registry.register("cafe\u0301", content) == "caf\u00e9"
    for name in ("caf\u00e9", "cafe\u0301"):
        with pytest.raises(AdapterError, match=content.digest):
            registry.register(name, revision(2.0))
        assert registry.resolve(name).revision is content


def test_the_bases_name_is_refused(registry: AdapterRegistry) -> None:
    with pytest.raises(AdapterError, match="base"):
        registry.register("llama", revision())
    assert registry.resolve("llama").revision is None


def test_two_names_may_mean_one_revision(registry: AdapterRegistry) -> None:
    content = revision()
    registry.register("stable", content)
    registry.register("latest", content)
    assert registry.resolve("stable").revision is registry.resolve("latest").revision


def test_readers_keep_the_snapshot_they_took(registry: AdapterRegistry) -> None:
    before = registry.adapters
    registry.register("late", revision())
    assert list(before) == [] and list(registry.adapters) == ["late"]
    with pytest.raises(TypeError):
        registry.adapters["x"] = revision()  # type: ignore[index]


def test_of_many_threads_one_registers_a_name(registry: AdapterRegistry) -> None:
    outcomes: list[str] = []

    def attempt(index: int) -> None:
        for name in (f"own-{index}", "shared"):
            try:
                outcomes.append(registry.register(name, revision(index)))
            except AdapterError:
                outcomes.append("refused")

    threads = [threading.Thread(target=attempt, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("shared") == 1 and outcomes.count("refused") == 19
    assert len(registry.adapters) == 21


def test_a_registry_needs_a_base_name() -> None:
    with pytest.raises(ValueError, match="base_names"):
        AdapterRegistry(())
