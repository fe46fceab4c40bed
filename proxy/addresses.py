"""Which addresses a media URL may lead to (guard against server-side request forgery)."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

#: Where an IPv6-only network maps the IPv4 internet (RFC 6052).
_NAT64 = IPv6Network("64:ff9b::/96")


def parse_address(text: str) -> Address:
    """An address as ``getaddrinfo`` prints it, with or without a scope. Raises ValueError."""
    return ip_address(text.partition("%")[0])


def is_public(address: Address) -> bool:
    """Whether the address is a unicast address of the public internet.

    An IPv6 address that stands for an IPv4 address (mapped, NAT64, 6to4) is public if that one is.
    """
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(inner)
        if address.is_site_local:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved
