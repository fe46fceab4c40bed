"""Which addresses a media URL may lead to (guard against server-side request forgery)."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

#: Where an IPv6-only network maps the IPv4 internet (RFC 6052).
_NAT64 = IPv6Network("64:ff9b::/96")
#: The IPv6 addresses given out for the internet (RFC 4291, section 2.4); all others are for something else.
_GLOBAL_UNICAST = IPv6Network("2000::/3")
#: Parts of it that lead elsewhere, whatever a Python's own table says: Teredo (the address of a NAT and of a relay,
#: RFC 4380), ORCHIDs (RFC 4843, RFC 7343), documentation (RFC 3849, RFC 9637), benchmarks (RFC 5180), and the
#: addresses of protocols rather than hosts (RFC 2928).
_NOT_HOSTS = tuple(
    IPv6Network(text)
    for text in ("2001::/23", "2001:db8::/32", "3fff::/20", "2002::/16", "3ffe::/16", "5f00::/16")
)
#: An interface identifier that ISATAP makes from an IPv4 address (RFC 5214, section 6.1), without and with the bit
#: that says "globally unique".
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)


def parse_address(text: str) -> Address:
    """An address as ``getaddrinfo`` prints it, with or without a scope. Raises ValueError."""
    return ip_address(text.partition("%")[0])


def is_public(address: Address) -> bool:
    """Whether the address is a unicast address of the public internet.

    An IPv6 address that stands for an IPv4 address (mapped, NAT64, 6to4, ISATAP) is public if that one is, too.
    """
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast and not address.is_reserved
    if (mapped := address.ipv4_mapped) is not None:
        return is_public(mapped)
    number = int(address)
    if address in _NAT64:
        return is_public(IPv4Address(number & 0xFFFF_FFFF))
    if address.sixtofour is not None:
        return is_public(address.sixtofour)
    if number >> 32 & 0xFFFF_FFFF in _ISATAP and not is_public(IPv4Address(number & 0xFFFF_FFFF)):
        return False
    if address not in _GLOBAL_UNICAST or any(address in network for network in _NOT_HOSTS):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved
