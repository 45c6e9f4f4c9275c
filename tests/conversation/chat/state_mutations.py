"""Random damage to state bytes, as caused by storage, transport or manual edits."""

import random
from collections.abc import Callable

Mutation = Callable[[random.Random, bytes], bytes]

# Fragments that can change the meaning of JSON.
_FRAGMENTS = [
    *(each.encode() for each in '"\\{}[],:019-é'),
    *(b"e9", b"null", b"true", b"NaN", b"\\ud800", b"\x00", b"\xff", b"gAAAAA"),
    *(b'"version":1', b'"version":3', b'"blocks":[]', b'"messages":[]', b'"processed_length":0'),
]


def _set_byte(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def _cut_middle(rng: random.Random, data: bytes) -> bytes:
    start, stop = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:start] + data[stop:]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(_FRAGMENTS) + data[at:]


def _overwrite(rng: random.Random, data: bytes) -> bytes:
    fragment = rng.choice(_FRAGMENTS)
    at = rng.randrange(len(data))
    return data[:at] + fragment + data[at + len(fragment) :]


def _repeat_slice(rng: random.Random, data: bytes) -> bytes:
    start, stop = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:stop] + data[start:stop] + data[stop:]


def _swap_slices(rng: random.Random, data: bytes) -> bytes:
    a, b, c = sorted(rng.randrange(len(data) + 1) for _ in range(3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


def _change_version(rng: random.Random, data: bytes) -> bytes:
    return data.replace(b'"version":3', b'"version":%d' % rng.choice([0, 1, 2, 99]))


MUTATIONS: tuple[Mutation, ...] = (
    *(_set_byte, _cut_middle, _insert, _overwrite, _repeat_slice, _swap_slices, _change_version),
)


def mutate(rng: random.Random, data: bytes, max_mutations: int = 3) -> bytes:
    """Return the bytes after one to ``max_mutations`` random mutations."""
    for _ in range(rng.randint(1, max_mutations)):
        if data:
            data = rng.choice(MUTATIONS)(rng, data)
    return data
