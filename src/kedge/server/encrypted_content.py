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
from dataclasses import dataclass
from typing import Any, cast

from kedge.server.json_codec import decode, encode


@dataclass(frozen=True, slots=True)
class ReasoningPayload:
    """One thought: its text, what the model wants kept with it, whether its text was shown."""

    text: str
    model_data: Any = None
    visible: bool = True

    def to_json(self) -> Any:
        """Give the JSON value to seal: the bare text where there is nothing else."""
        if self.model_data is None and self.visible:
            return self.text
        return {"thought": self.text, "kept": self.model_data, "shown": self.visible}


def parse_reasoning_payload(value: object) -> ReasoningPayload | None:
    """Read the value of an opened seal; None if it holds something else."""
    if isinstance(value, str):
        return ReasoningPayload(value)
    if isinstance(value, dict) and "thought" in value:
        held = cast("dict[str, Any]", value)
        return ReasoningPayload(held["thought"], held["kept"], held["shown"])
    return None


KEY_BYTES = 32
_NONCE_BYTES = 16
_TAG_BYTES = 16
_VERSION = b"\x01"


class ContentCipher:
    """Seals and opens values under one key."""

    def __init__(self, key: bytes) -> None:
        self._stream_key = hashlib.blake2b(b"stream", key=key).digest()
        self._tag_key = hashlib.blake2b(b"tag", key=key).digest()

    def encrypt(self, value: object) -> str:
        """Seal a JSON value."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        body = _VERSION + nonce + self._apply_keystream(nonce, zlib.compress(encode(value)))
        return urlsafe_b64encode(body + self._compute_tag(body)).decode()

    def decrypt(self, text: str) -> Any:
        """Open a seal of ours; anything else, or one that was changed, gives None."""
        try:
            sealed = urlsafe_b64decode(text)
        except ValueError:
            return None
        body, tag = sealed[:-_TAG_BYTES], sealed[-_TAG_BYTES:]
        if urlsafe_b64encode(sealed).decode() != text:  # base64 overlooks strange characters
            return None
        if not hmac.compare_digest(tag, self._compute_tag(body)):
            return None
        start = len(_VERSION) + _NONCE_BYTES
        return decode(
            zlib.decompress(self._apply_keystream(body[len(_VERSION) : start], body[start:]))
        )

    def _apply_keystream(self, nonce: bytes, data: bytes) -> bytes:
        stream = hashlib.shake_256(self._stream_key + nonce).digest(len(data))
        mixed = int.from_bytes(data) ^ int.from_bytes(stream)
        return mixed.to_bytes(len(data))

    def _compute_tag(self, body: bytes) -> bytes:
        return hashlib.blake2b(body, key=self._tag_key, digest_size=_TAG_BYTES).digest()
