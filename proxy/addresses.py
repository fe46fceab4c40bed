"""Which addresses a media URL may lead to (guard against server-side request forgery)."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

_NAT64 = IPv6Network("64:ff9b::/96")
_IPV4_COMPATIBLE = IPv6Network("::/96")


def parse_address(text: str) -> Address:
    """An address as ``getaddrinfo`` prints it, with or without a scope. Raises ValueError."""
    return ip_address(text.partition("%")[0])


def is_public(address: Address) -> bool:
    """Whether the address is a unicast address of the public internet.

    An IPv6 address that carries an IPv4 address (mapped, compatible, 6to4, Teredo, NAT64) is as public as the
    least public address in it.
    """
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if isinstance(address, IPv4Address):
        return True
    return not address.is_site_local and all(is_public(inner) for inner in _embedded(address))


def _embedded(address: IPv6Address) -> list[IPv4Address]:
    found = [inner for inner in (address.ipv4_mapped, address.sixtofour) if inner is not None]
    if address.teredo is not None:
        found.extend(address.teredo)
    if address in _NAT64 or address in _IPV4_COMPATIBLE:
        found.append(IPv4Address(int(address) & 0xFFFF_FFFF))
    return found
