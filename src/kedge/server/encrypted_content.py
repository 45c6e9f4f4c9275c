"""The ``encrypted_content`` of reasoning and compaction items: data that only this server can read.

Clients store it and send it back; they can neither read nor change it. The key is stored in the
database only, so only the server that encrypted a value can decrypt it.
"""

import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from kedge.security.encryption import FernetCipher
from kedge.text.json_text import decode, encode


@dataclass(frozen=True, slots=True)
class ReasoningPayload:
    """One reasoning item: its text, the model's own data, and whether the client saw the text."""

    text: str
    model_data: Any = None
    visible: bool = True

    def to_json(self) -> Any:
        """Return the JSON value to encrypt: the bare text if there is nothing else."""
        if self.model_data is None and self.visible:
            return self.text
        return {"thought": self.text, "kept": self.model_data, "shown": self.visible}


def parse_reasoning_payload(value: object) -> ReasoningPayload | None:
    """Parse a decrypted value; return None if it is not a reasoning payload."""
    if isinstance(value, str):
        return ReasoningPayload(value)
    if isinstance(value, dict) and "thought" in value:
        fields = cast("dict[str, Any]", value)
        return ReasoningPayload(fields["thought"], fields["kept"], fields["shown"])
    return None


KEY_BYTES = 32


class ContentCipher:
    """A cipher for JSON values with one key of 32 random bytes."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @cached_property
    def _cipher(self) -> FernetCipher:
        # Built on first use: few servers encrypt anything, and all of them should start quickly.
        return FernetCipher(urlsafe_b64encode(self._key))

    def encrypt(self, value: object) -> str:
        """Encrypt a JSON value."""
        return self._cipher.encrypt(zlib.compress(encode(value))).decode()

    def decrypt(self, text: str) -> Any:
        """Decrypt a value; return None if this server did not encrypt it or it was modified."""
        try:
            canonical = urlsafe_b64encode(urlsafe_b64decode(text)).decode()
        except ValueError:
            return None
        if canonical != text:  # decoding base64 skips characters that are not in its alphabet
            return None
        data = self._cipher.decrypt(text.encode())
        return None if data is None else decode(zlib.decompress(data))
