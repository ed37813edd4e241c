"""Checks of the host: the port, and settings that deserve a warning."""

from __future__ import annotations

import errno
import ipaddress
import socket
from pathlib import Path

from launch.options import ServeConfig
from launch.preflight.errors import PreflightError

TORCHRUN_PATIENCE = 30.0
"""Seconds between torchrun's SIGTERM and its SIGKILL."""


def check_port(host: str, port: int) -> None:
    """Check that ``host:port`` can be listened on, by binding it for a moment.

    Raises:
        PreflightError: the port is taken or not allowed, or the host is not of this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise PreflightError(
            f"host {host!r} can't be resolved ({error.strerror}): set --host to an address of "
            f"this machine"
        ) from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: connections that linger from an earlier run are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise PreflightError(_why_not(host, port, error)) from error


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: stop what listens there, or choose another --port"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this process has: choose a --port from 1024 up"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"host {host!r} is not an address of this machine: set --host to one, or to 0.0.0.0"
    return f"can't listen on {host} port {port}: {error.strerror}"


def start_warnings(config: ServeConfig, *, torchrun: bool) -> tuple[str, ...]:
    """What deserves a line in the log though it is allowed.

    ``torchrun`` says whether torchrun started this process.
    """
    warnings = []
    if config.api_key_file is None and not is_loopback(config.host):
        warnings.append(
            f"listening on {config.host} without --api-key-file: anyone who reaches this port "
            f"can use every adapter"
        )
    if config.api_key_file is None and "*" in config.allowed_origins:
        warnings.append(
            "--allowed-origins * without --api-key-file: any page that is open in a browser which "
            "reaches this port can use every adapter"
        )
    if config.admin_key_file is None and (config.adapter_root or config.adapter_source):
        warnings.append(
            "without --admin-key-file no adapter can come while serving: --adapter-root and "
            "--adapter-source have no effect"
        )
    warnings += [
        f"--adapter-root {root} is no directory now: nothing can be loaded from it"
        for root in config.adapter_root
        if not Path(root).is_dir()
    ]
    drain = config.engine.drain_timeout
    if torchrun and drain >= TORCHRUN_PATIENCE:
        warnings.append(
            f"--drain-timeout {drain:g} is longer than the {TORCHRUN_PATIENCE:g} s after which "
            f"torchrun kills its processes: requests still open then are cut off"
        )
    return tuple(warnings)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host; a name other than localhost counts as no."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
