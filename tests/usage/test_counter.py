"""The default counter agrees with tiktoken on any text, without network access."""

import subprocess
import sys
import threading
from base64 import b64decode
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiktoken import Encoding
from tiktoken_ext import openai_public

from for_each import for_each
from kedge.errors import BrokenInstallation
from kedge.usage import tokens
from kedge.usage.tokens import TiktokenCounter, count_json, count_text


@pytest.fixture(scope="module")
def reference() -> Encoding:
    """Return tiktoken's o200k_base encoding, built from the bundled vocabulary instead of a download."""
    fields = tokens.read_vocabulary().split()
    pairs = zip(fields[::2], fields[1::2], strict=True)
    ranks = {b64decode(token): int(rank) for token, rank in pairs}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: ranks)
        return Encoding(**openai_public.o200k_base())


texts = st.text() | st.text(alphabet="aA .,\n\r\t'<|>s9\u00a0\u0301漢😀", max_size=300)


@given(texts)
def test_count_equals_tiktoken(reference: Encoding, text: str) -> None:
    """The count of any text, including line breaks, other scripts and emoji, equals that of tiktoken."""
    assert count_text(text) == len(reference.encode_ordinary(text))


@given(st.text(alphabet=st.characters(), min_size=1), st.integers(1, 4_000))
def test_count_of_a_long_text_equals_tiktoken(reference: Encoding, text: str, size: int) -> None:
    """The count of a text long enough to be cached by its hash equals that of tiktoken."""
    text = (text * size)[: tokens.MAX_SHORT_TEXT * 4] + "x" * tokens.MAX_SHORT_TEXT
    assert count_text(text) == len(reference.encode_ordinary(text))
    assert count_text(text) == len(reference.encode_ordinary(text))


def test_unusual_values_are_counted(reference: Encoding) -> None:
    """Special tokens are ordinary text, surrogates and JSON have a count; the pattern equals that of tiktoken."""
    assert tokens.get_encoding()._pat_str == reference._pat_str
    assert reference._special_tokens == tokens.SPECIAL_TOKENS
    assert count_json({"a": [1, "ü"]}) == len(reference.encode_ordinary('{"a":[1,"ü"]}'))
    for text in ("<|endoftext|>", "a<|endofprompt|>b", "<|im_start|>"):
        assert count_text(text) == len(reference.encode(text, disallowed_special=())) > 1
    for text in ("\ud800", "a\udfffb", "\ud83d\ude00", "\udc00" * 2_000):
        assert count_text(text) == len(reference.encode_ordinary(text)) > 0


def test_equal_texts_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counts of short and long texts are cached, in a bounded number, and long texts are not stored."""
    counted: list[str] = []
    real = tokens.split_text
    monkeypatch.setattr(tokens, "split_text", lambda text: counted.append(text) or real(text))
    token_counter = TiktokenCounter()
    for text in ("short", "long " * 1_000):
        assert token_counter.count_text(text) == token_counter.count_text("".join(list(text)))
    assert counted == ["short", "long " * 1_000]
    monkeypatch.setattr(tokens, "MAX_CACHED_LONG", 3)
    token_counter = TiktokenCounter()
    for i in range(10):
        token_counter.count_text(f"{i} " * tokens.MAX_SHORT_TEXT)
    assert len(token_counter._long_cache) == 3
    assert all(isinstance(key, bytes) for key in token_counter._long_cache)


def test_many_threads_load_the_vocabulary_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that count at the same time load the vocabulary only once."""
    loads: list[int] = []
    real = tokens.read_vocabulary
    monkeypatch.setattr(tokens, "read_vocabulary", lambda: loads.append(1) or real())
    tokens._build_encoding.cache_clear()
    start = threading.Barrier(4)

    def count(i: int) -> int:
        start.wait(300)
        return TiktokenCounter().count_text(f"hello {i}")

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(count, range(4)))) == 1
    assert loads == [1]


def test_damaged_vocabulary_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary file with a wrong hash raises ``BrokenInstallation``."""
    monkeypatch.setattr(tokens, "VOCABULARY_SHA256", "0" * 64)
    with pytest.raises(BrokenInstallation, match="reinstall kedge"):
        tokens.read_vocabulary()


OFFLINE_SCRIPT = """
import socket, sys
import kedge.usage.tokens
assert "tiktoken" not in sys.modules, "tiktoken came with the import"
def closed(*_, **__): raise AssertionError("the network was touched")
socket.socket.connect = socket.getaddrinfo = socket.create_connection = closed
print(kedge.usage.tokens.count_text("Hello, world!"))
"""


def test_counting_is_lazy_and_offline() -> None:
    """Importing Kedge does not import tiktoken, and counting opens no connection."""
    run = [sys.executable, "-c", OFFLINE_SCRIPT]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "4"), done.stderr


def test_megabyte_of_one_character_is_counted() -> None:
    """A long run that would overflow tiktoken is counted, in proportion to its length."""
    for character in "a\n \t!":
        assert count_text(character * 1_048_576) == 16 * count_text(character * 65_536), character


def test_a_very_long_text_is_counted_from_samples(
    reference: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A very long text is counted from a fixed number of samples, and the estimate is close."""
    read: list[int] = []

    def encode(text: str) -> list[int]:
        read.append(len(text))
        return reference.encode_ordinary(text)

    encoding = SimpleNamespace(encode_ordinary=encode)
    monkeypatch.setattr(tokens, "get_encoding", lambda: encoding)
    line = "The quick brown fox jumps over the lazy dog, and the dog lets it. "
    text = line * (tokens.MAX_EXACT_LENGTH // len(line) + 1)
    estimate = TiktokenCounter().count_text(text)
    assert sum(read) == tokens.SAMPLE_CHUNKS * tokens.CHUNK_LENGTH
    exact = len(reference.encode_ordinary(line * 100)) * len(text) / len(line * 100)
    assert estimate == pytest.approx(exact, rel=0.01)


BLANKS = [" ", "\t", "\x0c", "\u00a0", "\u2003", "\u3000"]


def count_pieces(text: str) -> int:
    return sum(len(tokens.get_encoding().encode_ordinary(part)) for part in tokens.split_text(text))


def count_exact(text: str) -> int:
    return len(tokens.get_encoding().encode_ordinary(text))


@for_each(
    ("blank", "before", "after"),
    [(blank, "x", "y") for blank in BLANKS]
    + [(" ", "", ""), (" ", "a\n", "."), ("\u3000", "\n", "\n")],
)
def test_a_run_of_one_blank_is_counted_exactly(blank: str, before: str, after: str) -> None:
    """A long run of one blank character is counted exactly, with any text before and after it."""
    text = before + blank * 150_011 + after
    assert count_pieces(text) == count_exact(text)


def test_run_of_mixed_blanks_is_counted_approximately() -> None:
    """Each split inside a run of mixed blanks adds at most two tokens and never removes one."""
    text = "x" + " \t\u00a0\t" * 40_001 + "y"
    cuts = sum(1 for _ in tokens.split_text(text))
    assert 0 <= count_pieces(text) - count_exact(text) <= 2 * cuts


small = st.lists(
    st.sampled_from(["a", "B", "1", ".", "'s", "\n", "\r\n", "/", "\x1c"])
    | st.builds(str.__mul__, st.sampled_from([" ", "\t"]), st.integers(1, 40)),
    max_size=12,
).map("".join)


@given(small)
def test_splitting_runs_does_not_change_the_count(text: str) -> None:
    """Splitting a text at long runs does not change its count, for any text and low limits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "MAX_BLANK_RUN", 4)
        patch.setattr(tokens, "CHUNK_LENGTH", 1_000)
        patch.setattr(tokens, "_LONG_RUN_PATTERN", tokens.compile_long_run(4))
        assert "".join(tokens.split_text(text)) == text
        if "\t" not in text or " " not in text:
            assert count_pieces(text) == count_exact(text)
