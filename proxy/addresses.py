"""Which addresses a media URL may lead to (guard against server-side request forgery)."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

#: Where an IPv6-only network maps the IPv4 internet (RFC 6052).
_NAT64 = IPv6Network("64:ff9b::/96")
#: The IPv6 addresses given out for the internet (RFC 4291, section 2.4); all others are for something else.
_GLOBAL_UNICAST = IPv6Network("2000::/3")
#: Parts of it that lead elsewhere, whatever a Python's own table says: Teredo and others of RFC 2928 (2001::/23),
#: documentation (RFC 3849, RFC 9637), and what was once given out for experiments (RFC 3701, RFC 9602).
_NOT_HOSTS = tuple(IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "3fff::/20", "3ffe::/16"))
#: The same for IPv4: addresses of protocols (RFC 6890), and the relays of 6to4 (RFC 7526).
_NOT_HOSTS_IPV4 = tuple(IPv4Network(text) for text in ("192.0.0.0/24", "192.88.99.0/24"))
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
        if any(address in network for network in _NOT_HOSTS_IPV4):
            return False
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
