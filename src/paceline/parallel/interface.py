# SPDX-License-Identifier: Apache-2.0
"""Which network interface an address of this machine belongs to.

gloo listens where the machine's own name leads, which is often a loopback address (127.0.1.1 on Debian): other machines
then look for this one on themselves. By the interface's name it is told better.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux: an interface's IPv4 address."""


def interface_of(endpoint: str) -> str | None:
    """The interface with the address in ``endpoint`` (``tcp://host:port``); None if there is none."""
    host = endpoint.rpartition(":")[0].removeprefix("tcp://").strip("[]")
    try:
        address = ip_address(host)
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return _by_v4(address) if isinstance(address, IPv4Address) else _by_v6(address)


def _by_v4(address: IPv4Address) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
            except OSError:  # it has none
                continue
            if found[20:24] == address.packed:
                return name
    return None


def _by_v6(address: IPv6Address) -> str | None:
    try:
        table = Path("/proc/net/if_inet6").read_text()
    except OSError:
        return None
    for line in table.splitlines():
        packed, *_, name = line.split()
        if packed == address.packed.hex():
            return name
    return None
