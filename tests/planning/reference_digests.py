"""Digests computed anew from their definition, with nothing remembered."""

import hashlib
import json
from typing import Any

from kedge.planning import canonical
from kedge.turns import Turn


def naive_digests(turn: Turn) -> list[str]:
    """The rolling digest of every prefix, computed anew from the definition."""
    last = hashlib.sha256(b"kedge.turn/1").digest()
    digests = [f"sha256:{last.hex()}"]
    for form in map(canonical, turn.body):
        if form is not None:
            leaf = hashlib.sha256(canonical_bytes(form)).digest()
            last = hashlib.sha256(last + leaf).digest()
            digests.append(f"sha256:{last.hex()}")
    return digests


def canonical_bytes(form: dict[str, Any]) -> bytes:
    """The JSON of a canonical form, as everybody would write it."""
    text = json.dumps(form, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return text.encode()
