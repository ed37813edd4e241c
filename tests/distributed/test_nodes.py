"""Two nodes that share nothing but a network: they serve as one, and end as one."""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.nodes import Network, Nodes, two_networks
from tests.helpers.tiny_models import make_checkpoint, make_peft_adapter
from tp_engine import LLM, SamplingParams

RANK_TIMEOUT = 6.0
OPTIONS = (
    "--served-model-name=base",
    "--lora-dir=adapters",
    f"--rank-timeout={RANK_TIMEOUT:g}",
    "--num-pages=100",
    "--max-num-seqs=8",
)
PROMPT = list(range(40, 60))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of both nodes; only the first has adapters."""
    first, second = (tmp_path_factory.mktemp(f"node-{node}") for node in (0, 1))
    model = make_checkpoint(first / "model", "llama", tokenizer=True, max_position_embeddings=1200)
    for number in range(3):
        path = first / "adapters" / f"style-{number}"
        make_peft_adapter(path, model, r=3 + 2 * number, seed=number)
    shutil.copytree(first / "model", second / "model")
    return [first, second]


@pytest.fixture
def network() -> Iterator[Network]:
    """With a cable, where this user may lay one."""
    try:
        with two_networks() as joined:
            yield joined
    except PermissionError:
        yield Network(address="127.0.0.1")


def alone(directory: Path) -> dict[str, str]:
    """What one rank answers."""
    paths = {path.name: str(path) for path in sorted((directory / "adapters").iterdir())}
    names = [None, *paths]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with LLM(str(directory / "model"), lora=paths, device="cpu", num_pages=100) as llm:
        answers = llm.generate([PROMPT] * len(names), params, model=names)
    assert answers is not None
    return {name or "base": answer.text for name, answer in zip(names, answers, strict=True)}


def wait_for_tokens(nodes: Nodes) -> None:
    """Return while a request is being served."""
    deadline = time.monotonic() + 20
    while "vllm:num_requests_running 1.0" not in nodes.http.get("/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def check_end(nodes: Nodes, left: int, start: float, reasons: list[str]) -> None:
    """The node that is left ended, in time, and said why."""
    assert nodes.agents[left].wait(RANK_TIMEOUT + 20) == 1
    assert time.monotonic() - start < RANK_TIMEOUT + 6
    assert any(f"the service ends: {reason}" in nodes.log(left) for reason in reasons)


def test_two_nodes_serve_what_one_rank_does_until_the_second_is_lost(
    directories: list[Path], network: Network
) -> None:
    wanted = alone(directories[0])
    assert len(set(wanted.values())) == len(wanted) == 4
    with Nodes(directories, network, *OPTIONS, ranks=2) as nodes:
        nodes.wait_ready()
        assert {name: nodes.complete(name, PROMPT, 24) for name in wanted} == wanted
        start = time.monotonic()
        nodes.kill(1)
        check_end(nodes, 0, start, ["rank 2 is gone", "rank 3 is gone"])


def test_a_node_ends_when_the_one_that_leads_is_lost(
    directories: list[Path], network: Network
) -> None:
    with Nodes(directories, network, *OPTIONS, ranks=1) as nodes:
        nodes.wait_ready()
        start = time.monotonic()
        nodes.kill(0)
        check_end(nodes, 1, start, ["rank 0 is gone"])


def test_both_nodes_end_when_the_network_between_them_fails(directories: list[Path]) -> None:
    try:
        with two_networks() as network, Nodes(directories, network, *OPTIONS, ranks=1) as nodes:
            nodes.wait_ready()
            with ThreadPoolExecutor() as pool:
                answer = pool.submit(nodes.ask, "style-1", PROMPT, 1000)
                wait_for_tokens(nodes)
                start = time.monotonic()
                network.pull()
                check_end(nodes, 0, start, ["rank 1 was silent for", "rank 0 made no progress"])
                check_end(nodes, 1, start, ["rank 0 was silent for", "rank 1 made no progress"])
                assert answer.result(10).status_code == 503
    except PermissionError as error:
        pytest.skip(str(error))
