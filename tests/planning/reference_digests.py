"""Digests computed directly from their definition, without caching."""

import hashlib
from typing import Any

import msgspec

from kedge.planning import canonical
from kedge.turns import Turn


def naive_digests(turn: Turn) -> list[str]:
    """Return the rolling digest of every prefix, computed directly from the definition."""
    last = hashlib.sha256(b"kedge.turn/1").digest()
    digests = [f"sha256:{last.hex()}"]
    for form in map(canonical, turn.body):
        if form is not None:
            leaf = hashlib.sha256(canonical_bytes(form)).digest()
            last = hashlib.sha256(last + leaf).digest()
            digests.append(f"sha256:{last.hex()}")
    return digests


def canonical_bytes(form: dict[str, Any]) -> bytes:
    """Return the JSON of a canonical form, with sorted keys."""
    return msgspec.json.encode(form, order="sorted")
