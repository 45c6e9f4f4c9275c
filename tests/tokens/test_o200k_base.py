"""The bundled vocabulary is the published one, and tokens are found in it."""

import hashlib

import pytest

from kedge.errors import BrokenInstallation
from kedge.tokens import o200k_base

PUBLISHED_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"


def test_vocabulary_is_the_published_file_in_sorted_order() -> None:
    """The lines are sorted; in the order of their ranks they are the published file."""
    lines = o200k_base.read_vocabulary().splitlines(keepends=True)
    assert lines == sorted(lines)
    lines.sort(key=lambda line: int(line.split()[1]))
    assert hashlib.sha256(b"".join(lines)).hexdigest() == PUBLISHED_SHA256


def test_damaged_vocabulary_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary file with a wrong hash raises ``BrokenInstallation``."""
    monkeypatch.setattr(o200k_base, "VOCABULARY_SHA256", "0" * 64)
    with pytest.raises(BrokenInstallation, match="reinstall kedge"):
        o200k_base.read_vocabulary()


def test_single_tokens_are_found() -> None:
    """A token is found with its rank: the first and last line, and many between them."""
    vocabulary = o200k_base.read_vocabulary()
    ranks = o200k_base.parse_ranks(vocabulary)
    tokens = list(ranks)
    for token in (tokens[0], tokens[-1], *tokens[::199]):
        assert o200k_base.find_rank(vocabulary, token) == ranks[token]
        longer = token + b"\xff"
        assert o200k_base.find_rank(vocabulary, longer) == ranks.get(longer)


@pytest.mark.parametrize("token", [b"", b"\x00\x00\x00\x01", b"qzxv", b"\xff\xff\xff\xff"])
def test_missing_tokens_are_not_found(token: bytes) -> None:
    """A text that is not a token has no rank, wherever it would be sorted."""
    assert o200k_base.find_rank(o200k_base.read_vocabulary(), token) is None
