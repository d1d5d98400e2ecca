"""Decides whether a host is a loopback address, so that what is sent to it crosses no network."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a name or an address leads to the loopback interface (RFC 6761, 6.3), also one of IPv4 within IPv6."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = host.removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
