"""How much memory this host, or the container this process runs in, has left."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes() -> int:
    """Memory that this process can still take: the host's, or what its container has left."""
    return min(psutil.virtual_memory().available, container_free_bytes(_CGROUP))


def container_free_bytes(cgroup: Path) -> int:
    """What the cgroup (version 2) at this path leaves; 2**63 - 1 when it sets no limit.

    File cache counts as free: the kernel gives it up first.
    """
    limit = cgroup / "memory.max"
    if not limit.is_file() or limit.read_text().strip() == "max":
        return 2**63 - 1
    used = int((cgroup / "memory.current").read_text())
    stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return int(limit.read_text()) - used + int(stat["inactive_file"])
