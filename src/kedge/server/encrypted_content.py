"""The ``encrypted_content`` of reasoning and compaction items: data that only this server can read.

Clients store it and send it back; they can neither read nor change it. The key is stored in the
database only, so only the server that encrypted a value can decrypt it.

Compaction replaces a long context by one such item. It contains the items that replace everything before it: a note
about the omitted items (with a summary, if the model writes one), as much of the system text and of the user's earlier
messages as fits (the first one has priority), and the end of the newest exchange. From then on a context starts at its
newest compaction item.
"""

import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

from msgspec import Struct

from kedge._internal.encryption import FernetCipher
from kedge._internal.json_text import decode, encode
from kedge.errors import InvalidSetting, describe_extra
from kedge.server.errors import ENCRYPTION_MISSING, INVALID_ENCRYPTED_CONTENT
from kedge.server.object_forms import Item
from kedge.server.token_counting import count_items


class ReasoningPayload(Struct, frozen=True):
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
    """A cipher for JSON values.

    Args:
        key: 32 random bytes.
        is_available: Whether the package that encrypts is installed.
    """

    def __init__(self, key: bytes, *, is_available: bool = True) -> None:
        self._key = key
        self.is_available = is_available

    @cached_property
    def _cipher(self) -> FernetCipher:
        # Built on first use: few servers encrypt anything, and all of them should start quickly.
        if not self.is_available:
            raise InvalidSetting(describe_extra("encryption"))
        return FernetCipher(urlsafe_b64encode(self._key))

    def require(self, param: str) -> None:
        """Reject a request that needs encryption if the package is not installed.

        Raises:
            ApiError: It is not; the message names the extra.
        """
        if not self.is_available:
            raise ENCRYPTION_MISSING(param=param, reason=describe_extra("encryption"))

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
        self.require("input")
        data = self._cipher.decrypt(text.encode())
        if data is None:
            return None
        return decode(zlib.decompress(data))


TRIGGER_TYPE = "compaction_trigger"
MAX_QUOTE_CHARS = 200
"""Maximum length of the quotation in a note."""

RETAINED_ROLES = frozenset({"user", "system", "developer"})


class CompactedContext(Struct, frozen=True):
    """The replacement of a context: the retained items, and a note of the omitted ones.

    ``summary`` is the model's summary of the omitted items.
    """

    omitted_items: Sequence[Item]
    retained_items: Sequence[Item]
    summary: str = ""

    @property
    def items(self) -> list[Item]:
        """The items that replace the context, the note first."""
        return [*_build_note(self.omitted_items, self.summary), *self.retained_items]


def compact(items: Sequence[Item], max_tokens: int) -> CompactedContext:
    """Return the replacement of these items, in about ``max_tokens`` tokens.

    The newest message of the user is always retained, and so is the end of the items after it, which starts
    where no call is separated from its output and no item from its reasoning.
    """
    start = find_newest_exchange(items)
    question = [item for item in items[start : start + 1] if item.get("role") == "user"]
    answer = items[start + len(question) :]
    max_tokens -= count_items(question)
    tail = _fit_tail(answer, max_tokens)
    max_tokens -= count_items(tail)
    earlier = [item for item in items[:start] if item.get("role") in RETAINED_ROLES]
    retained = [*_fit_items(earlier, max_tokens), *question, *tail]
    retained_ids = {id(item) for item in retained}
    omitted = [item for item in items if id(item) not in retained_ids]
    return CompactedContext(omitted, retained)


def retain_user_messages(compacted: CompactedContext, items: Sequence[Item]) -> CompactedContext:
    """Retain every message of the user as well, regardless of the number of tokens."""
    retained_ids = {id(item) for item in compacted.retained_items}
    omitted: list[Item] = []
    retained: list[Item] = []
    for item in items:
        if id(item) in retained_ids or item.get("role") == "user":
            retained.append(item)
        else:
            omitted.append(item)
    return CompactedContext(omitted, retained)


def find_newest_exchange(items: Sequence[Item]) -> int:
    """Return the index of the user's last message, or 0."""
    for index in range(len(items) - 1, -1, -1):
        if items[index].get("role") == "user":
            return index
    return 0


def _fit_tail(items: Sequence[Item], max_tokens: int) -> Sequence[Item]:
    """Return the longest end of the items that fits, or the shortest possible one."""
    tokens = 0
    unpaired_call_ids: set[str] = set()
    best: int | None = None
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        tokens += count_items([item])
        if best is not None and tokens > max_tokens:
            break
        if "call_id" in item:
            unpaired_call_ids ^= {item["call_id"]}
        has_reasoning_before = index > 0 and items[index - 1]["type"] == "reasoning"
        if not unpaired_call_ids and not has_reasoning_before:
            best = index
    return items if best is None else items[best:]


def build_compaction_item(
    cipher: ContentCipher, id: str, retained_items: Sequence[Item]
) -> dict[str, Any]:
    """Build the compaction item with the retained items."""
    return {"id": id, "type": "compaction", "encrypted_content": cipher.encrypt(retained_items)}


def expand_compaction(cipher: ContentCipher, items: Sequence[Item]) -> Sequence[Item]:
    """Replace a compaction item at the start by the items in it, as a model sees them.

    Raises:
        ApiError: If this server cannot decrypt it.
    """
    if not items or items[0]["type"] != "compaction":
        return items
    content: str = items[0]["encrypted_content"]
    retained: list[Item] | None = cipher.decrypt(content)
    if not isinstance(retained, list):  # a reasoning item's content can be decrypted, too
        raise INVALID_ENCRYPTED_CONTENT(content=f"{content[:4]}...")
    return [*retained, *items[1:]]


def _fit_items(items: Sequence[Item], max_tokens: int) -> list[Item]:
    """Return the first item and then the newest ones, as long as they fit, in order."""
    positions: set[int] = set()
    for index in [*range(min(1, len(items))), *range(len(items) - 1, 0, -1)]:
        max_tokens -= count_items([items[index]])
        if max_tokens < 0:
            break
        positions.add(index)
    return [item for index, item in enumerate(items) if index in positions]


def _find_last_answer(items: Sequence[Item]) -> str:
    """Return the text of the assistant's last message that has a text, or an empty text."""
    for item in reversed(items):
        if item.get("role") == "assistant":
            text = " ".join(part.get("text", "") for part in item["content"])
            if text:
                return text
    return ""


def _build_note(omitted_items: Sequence[Item], summary: str) -> list[Item]:
    if not omitted_items:
        return []
    counts = Counter(item.get("role") or item["type"] for item in omitted_items)
    types = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    text = f"Earlier items of this conversation were compacted: {types}."
    last_answer = _find_last_answer(omitted_items)
    if summary:
        text += f" In summary: {summary}"
    elif last_answer:
        text += f" The last answer was: {last_answer[:MAX_QUOTE_CHARS]}"
    content = [{"type": "input_text", "text": text}]
    return [{"type": "message", "role": "developer", "content": content}]
