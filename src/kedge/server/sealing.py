"""Sealed content: what a client carries for the server and can neither read nor change.

``encrypted_content`` of reasoning and compaction items is made here. The key never leaves the
database, so only the server that made a seal can open it. The cipher is SHAKE-256 as a key stream
under a fresh nonce, then a keyed BLAKE2b over everything (encrypt, then authenticate): built from
the standard library, meant for an opaque hand-over, not for secrets that outlive the database.
"""

import hashlib
import hmac
import secrets
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any

from kedge.server.wire import decode, encode

KEY_BYTES = 32
_NONCE = 16
_TAG = 16
_VERSION = b"\x01"


class Sealer:
    """Seals and opens values under one key."""

    def __init__(self, key: bytes) -> None:
        self._stream_key = hashlib.blake2b(b"stream", key=key).digest()
        self._tag_key = hashlib.blake2b(b"tag", key=key).digest()

    def seal(self, value: object) -> str:
        """Seal a JSON value."""
        nonce = secrets.token_bytes(_NONCE)
        body = _VERSION + nonce + self._mixed(nonce, zlib.compress(encode(value)))
        return urlsafe_b64encode(body + self._tag(body)).decode()

    def open(self, text: str) -> Any:
        """Open a seal of ours; anything else, or one that was changed, gives None."""
        try:
            sealed = urlsafe_b64decode(text)
        except ValueError:
            return None
        body, tag = sealed[:-_TAG], sealed[-_TAG:]
        if urlsafe_b64encode(sealed).decode() != text:  # base64 overlooks strange characters
            return None
        if not hmac.compare_digest(tag, self._tag(body)):
            return None
        start = len(_VERSION) + _NONCE
        return decode(zlib.decompress(self._mixed(body[len(_VERSION) : start], body[start:])))

    def _mixed(self, nonce: bytes, data: bytes) -> bytes:
        stream = hashlib.shake_256(self._stream_key + nonce).digest(len(data))
        mixed = int.from_bytes(data) ^ int.from_bytes(stream)
        return mixed.to_bytes(len(data))

    def _tag(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, key=self._tag_key, digest_size=_TAG).digest()
