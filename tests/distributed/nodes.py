"""Two torchrun "nodes" on this host that serve together; where it is allowed the second one has a
network of its own, joined to this one by a cable that can be pulled.

The nodes share no files: each has its own directory with its own copy of the model, and options
name everything by relative paths.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.distributed.torchrun import MARK, ROOT, kill_marked
from tests.helpers.ports import free_port

START_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """How the nodes reach each other."""

    address: str
    """Of node 0, as node 1 knows it."""
    prefixes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Commands that run another one where the node is."""
    interfaces: tuple[str, str] = ("lo", "lo")
    """Through which each node reaches the other."""

    def pull(self) -> None:
        """Nothing arrives any more, and nobody is told."""
        run("ip", "link", "set", self.interfaces[0], "down")


@contextmanager
def two_networks() -> Iterator[Network]:
    """A network for node 1, beside this process's own for node 0.

    Raises:
        PermissionError: this user may not make one.
    """
    tag = uuid.uuid4().hex[:6]
    space, here, there = f"tp-{tag}", f"tph-{tag}", f"tpt-{tag}"
    subnet = f"10.231.{int(tag[:2], 16)}"
    inside = ("ip", "netns", "exec", space)
    try:
        try:
            run("ip", "netns", "add", space)
            run("ip", "link", "add", here, "type", "veth", "peer", "name", there)
            run("ip", "link", "set", there, "netns", space)
        except (OSError, subprocess.CalledProcessError) as error:
            raise PermissionError(f"no network namespaces: {error}") from error
        run("ip", "addr", "add", f"{subnet}.1/30", "dev", here)
        run("ip", "link", "set", here, "up")
        run(*inside, "ip", "link", "set", "lo", "up")
        run(*inside, "ip", "addr", "add", f"{subnet}.2/30", "dev", there)
        run(*inside, "ip", "link", "set", there, "up")
        yield Network(address=f"{subnet}.1", prefixes=((), inside), interfaces=(here, there))
    finally:
        for command in (("link", "del", here), ("netns", "del", space)):
            subprocess.run(("ip", *command), capture_output=True, check=False)


def run(*command: str) -> None:
    """Run a command to its end; raises CalledProcessError when it fails."""
    subprocess.run(command, check=True, capture_output=True)


class Nodes:
    """Two torchruns that serve one model. Use as a context manager: nothing outlives it."""

    def __init__(
        self, directories: Sequence[Path], network: Network, *options: str, ranks: int
    ) -> None:
        """Start both.

        Args:
            directories: of node 0 and node 1; each has ``model``, and logs are written there.
            network: between them.
            options: of serve.py, besides model and port.
            ranks: of each node.
        """
        self._mark = uuid.uuid4().hex
        self._directories = directories
        self.port, meeting = free_port(), free_port(network.address)
        self.agents = [
            self._start(node, network, meeting, ranks, options) for node in range(len(directories))
        ]
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=60.0)

    def _start(
        self, node: int, network: Network, meeting: int, ranks: int, options: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        torchrun += [f"--nproc-per-node={ranks}", f"--node-rank={node}"]
        torchrun += [f"--master-addr={network.address}", f"--master-port={meeting}"]
        serve = [str(ROOT / "launch" / "serve.py"), "--model=model", f"--port={self.port}"]
        fresh = {MARK: self._mark, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
        fresh |= {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": network.interfaces[node]}
        with (self._directories[node] / "log").open("wb") as log:
            return subprocess.Popen(
                [*network.prefixes[node], *torchrun, *serve, *options],
                cwd=self._directories[node],
                env=os.environ | fresh,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.close()
        kill_marked(self._mark)
        for agent in self.agents:
            agent.wait(10)
        if exception[0] is not None:
            print(*(f"--- node {node}\n{self.log(node)}" for node in (0, 1)), sep="\n")

    def log(self, node: int) -> str:
        """All that a node's processes wrote so far."""
        return (self._directories[node] / "log").read_text("utf-8", "replace")

    def wait_ready(self) -> Nodes:
        """Return once it serves; fails when a node ends first."""
        deadline = time.monotonic() + START_SECONDS
        while not self._ready():
            assert time.monotonic() < deadline, "not ready in time"
            assert [agent.poll() for agent in self.agents] == [None, None], "a node ended"
            time.sleep(0.1)
        return self

    def _ready(self) -> bool:
        try:
            return self.http.get("/ready", timeout=5.0).status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, model: str, prompt: list[int], tokens: int) -> httpx.Response:
        """Ask for a greedy completion."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return self.http.post("/v1/completions", json={**body, "ignore_eos": True})

    def complete(self, model: str, prompt: list[int], tokens: int) -> str:
        """The text of a greedy completion."""
        answer = self.ask(model, prompt, tokens)
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def kill(self, node: int) -> None:
        """End all processes of a node at once, as a power cut would."""
        agent = psutil.Process(self.agents[node].pid)
        for process in (agent, *agent.children(recursive=True)):
            process.send_signal(signal.SIGKILL)
