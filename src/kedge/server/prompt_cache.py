"""Prompt caching by the rules of the hosted APIs, which reuse recently processed prefixes of prompts.

A prompt is a sequence of segments: settings (model, cache key, instructions, tools, format), then items or content
blocks. A prefix is identified by a rolling hash of its segments, so a prompt shares a cached prefix if
it starts with exactly the same segments. Hosted APIs compare tokens; this server compares complete segments.

- *Automatic* caching (Responses, Chat Completions): every prompt is cached. A prefix has at least 1,024
  tokens, rounded down to a multiple of 128, and is cached for ten minutes after its last use or for the
  requested ``prompt_cache_retention``.
- *Explicit* caching (Messages): only prefixes that end at a ``cache_control`` breakpoint are cached, if they
  have the model's minimum length, for the breakpoint's lifetime. A lookup starts at a breakpoint and
  compares at most 20 blocks before it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from json import dumps
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec

from kedge._internal.bounded_dict import BoundedDict

if TYPE_CHECKING:
    from kedge.server.object_forms import Item

MIN_CACHED_TOKENS = 1024
"""The minimum number of tokens of a prompt that is cached automatically."""
CACHED_TOKENS_STEP = 128
"""The number of tokens to a multiple of which automatically cached prefixes are rounded down."""
DEFAULT_LIFETIME = 600.0
"""Seconds for which an automatically cached prefix remains after its last use."""
RETENTIONS: Mapping[str, float] = {"24h": 86_400.0}
"""Lifetimes by ``prompt_cache_retention``; other values have the default lifetime."""
MAX_LOOKBACK = 20
"""Content blocks before a breakpoint that are compared with cached prefixes."""
MAX_ENTRIES = 20_000
"""The maximum number of cached prefixes, which take 6 MB."""
RENEWAL_SHARE = 0.1
"""The share of their lifetime for which the prefixes of a cached prompt are not renewed again.

A prompt in a long chain has hundreds of prefixes, and each turn uses all of them. If they were renewed every
time, the cost of a turn would grow with the length of the chain."""

EMPTY_DIGEST = b""
_DIGEST_BYTES = 16
# The encoding may differ between versions of msgspec, because digests are neither stored nor sent.
_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_UNSEEN_MEMBERS = frozenset({"id", "status", "encrypted_content", "cache_control"})
"""Members of a segment that are not part of the prompt."""
_SETTING_MEMBERS: tuple[str, ...] = ("model", "prompt_cache_key", "instructions", "tools", "text")


Prefix = tuple[bytes, int]
"""The digest of a prefix of a prompt, and its length in tokens, or 0 if the length is unknown."""


class Breakpoint(msgspec.Struct, frozen=True):
    """A requested cache breakpoint."""

    index: int
    """The index of the block at whose end it is."""
    tokens: int
    """The tokens of the prompt up to there."""
    lifetime: float
    """Seconds for which the prefix up to there remains cached without use."""


class PromptCache:
    """The prefixes that were processed recently, in bounded memory.

    Args:
        clock: Returns Unix time.
        max_entries: The maximum number of cached prefixes.
    """

    def __init__(self, clock: Callable[[], float], max_entries: int = MAX_ENTRIES) -> None:
        self._clock = clock
        self._lock = Lock()  # requests are prepared in the thread of the database, if that has one
        self._entries = BoundedDict[bytes, _Entry](max_entries)

    def use_prompt(self, prefixes: Iterable[Prefix], lifetime: float = DEFAULT_LIFETIME) -> int:
        """Cache a prompt automatically, and return the number of its tokens that were cached before.

        Args:
            prefixes: The prefixes of the prompt, longest first.
            lifetime: Seconds for which they remain cached without use.
        """
        cached_tokens = 0
        now = self._clock()
        renewed_at = now
        prefixes_to_store: list[Prefix] = []
        with self._lock:
            for digest, tokens in prefixes:
                # The first prefix that is found is the longest one; the shorter ones are stored again.
                entry = None
                if not cached_tokens:
                    entry = self._renew(digest, now)
                if entry is not None:
                    cached_tokens = entry.tokens
                    age = now - entry.renewed_at
                    if entry.lifetime == lifetime and age < lifetime * RENEWAL_SHARE:
                        renewed_at = entry.renewed_at
                        break
                if tokens >= MIN_CACHED_TOKENS:
                    prefixes_to_store.append((digest, tokens))
            # The longest prefix is stored last, so a full cache discards the shorter ones first.
            self._store(reversed(prefixes_to_store), lifetime, now, renewed_at)
        return cached_tokens - cached_tokens % CACHED_TOKENS_STEP

    def use_breakpoints(
        self, digests: Sequence[bytes], breakpoints: Sequence[Breakpoint], min_tokens: int
    ) -> tuple[int, int]:
        """Cache a prompt at its breakpoints; return the tokens read from the cache and written to it.

        Args:
            digests: The digest of the prefix up to each block.
            breakpoints: The breakpoints in order.
            min_tokens: The minimum number of tokens of a prefix that the model caches.
        """
        now = self._clock()
        cacheable = [point for point in breakpoints if point.tokens >= min_tokens]
        with self._lock:
            read_tokens = self._find_tokens(digests, breakpoints, now)
            for point in cacheable:
                self._store([(digests[point.index], point.tokens)], point.lifetime, now, now)
        if not cacheable:
            return read_tokens, 0
        written_tokens = max(cacheable[-1].tokens - read_tokens, 0)
        return read_tokens, written_tokens

    def _find_tokens(
        self, digests: Sequence[bytes], breakpoints: Sequence[Breakpoint], now: float
    ) -> int:
        """Return the tokens of the longest cached prefix near one of the breakpoints, and renew it."""
        for point in reversed(breakpoints):
            start = max(point.index - MAX_LOOKBACK, -1)
            for index in range(point.index, start, -1):
                entry = self._renew(digests[index], now)
                if entry is not None:
                    return entry.tokens
        return 0

    def _renew(self, digest: bytes, now: float) -> "_Entry | None":
        """Return an entry that has not expired and restart its lifetime, or return None."""
        entry = self._entries.get(digest)
        if entry is None or entry.expires_at <= now:
            return None
        entry.expires_at = now + entry.lifetime
        return entry

    def _store(
        self, prefixes: Iterable[Prefix], lifetime: float, now: float, renewed_at: float
    ) -> None:
        for digest, tokens in prefixes:
            self._entries[digest] = _Entry(tokens, lifetime, now + lifetime, renewed_at)


class _Entry(msgspec.Struct):
    """A cached prefix."""

    tokens: int
    lifetime: float
    expires_at: float
    renewed_at: float
    """When the shorter prefixes of its prompt were last renewed; see ``RENEWAL_SHARE``."""


def hash_prompt_settings(body: Mapping[str, Any]) -> bytes:
    """Return the digest of the settings, which precede the items of a prompt."""
    return _hash_segment(EMPTY_DIGEST, {name: body.get(name) for name in _SETTING_MEMBERS})


def hash_items(digest: bytes, items: "Iterable[Item]") -> Iterator[bytes]:
    """Yield the digest after each item; reasoning is not part of later prompts and does not change it."""
    for item in items:
        if item.get("type") != "reasoning":
            digest = _hash_segment(digest, item)
        yield digest


def iter_prefixes(
    settings: Prefix, history: Iterable[Prefix], items: "Sequence[Item]", counts: Iterable[int]
) -> Iterator[Prefix]:
    """Yield the prefixes of a prompt, longest first.

    Args:
        settings: The prefix of the settings, with which every prompt begins.
        history: The prefixes of the stored context, without the settings, longest first.
        items: The new items.
        counts: The tokens of each new item.
    """
    shorter = iter(history)
    context = next(shorter, None)
    digest, total = context or (EMPTY_DIGEST, 0)
    new_prefixes: list[Prefix] = []
    for item_digest, count in zip(hash_items(digest, items), counts, strict=False):
        total += count
        new_prefixes.append((item_digest, total))
    new_prefixes.reverse()
    if context is not None:
        new_prefixes.append(context)

    settings_digest, settings_tokens = settings
    for item_digest, tokens in chain(new_prefixes, shorter):
        length = 0  # unknown
        if tokens:
            length = settings_tokens + tokens
        yield settings_digest + item_digest, length
    yield settings


def _hash_segment(digest: bytes, segment: Mapping[str, Any]) -> bytes:
    members = {name: segment[name] for name in segment if name not in _UNSEEN_MEMBERS}
    try:
        encoded = _encode_sorted(members)
    except UnicodeEncodeError:  # a lone surrogate
        encoded = dumps(members, sort_keys=True).encode()
    return blake2b(digest + encoded, digest_size=_DIGEST_BYTES).digest()
