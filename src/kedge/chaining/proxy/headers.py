"""The headers that a proxy passes on."""

from collections.abc import Collection, Iterable

HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
"""Headers that belong to one connection and are not forwarded."""


def filter_headers(
    headers: Iterable[tuple[bytes, bytes]], names: Collection[bytes]
) -> list[tuple[bytes, bytes]]:
    """Return the headers to pass on: all except these names and the headers of one connection."""
    lowered = [(key.lower(), value) for key, value in headers]
    dropped = HOP_BY_HOP.union(names)
    for key, value in lowered:
        if key == b"connection":
            dropped |= {name.strip().lower() for name in value.split(b",")}
    kept = (pair for pair in lowered if pair[0] not in dropped)
    return [pair for pair in kept if not pair[0].startswith(b"sec-websocket-")]
