"""The documentation page on counting tokens matches the code."""

from pathlib import Path

from kedge import tokens

PAGE = (Path(__file__).parents[2] / "docs" / "tokens.md").read_text(encoding="utf-8")


def test_documented_numbers_match_the_code() -> None:
    """The page states the estimates and limits of the code."""
    for shown in (
        f"| overhead of an item (start, role, end) | {tokens.ITEM_OVERHEAD} |",
        f'| an image | {tokens.IMAGE_TOKENS}, or {tokens.LOW_DETAIL_IMAGE_TOKENS} with `detail: "low"` |',
        f"| a file, an audio clip | {tokens.FILE_TOKENS:,} |",
        f"more than {tokens.MAX_BLANK_RUN:,} blanks",
        f"every {tokens.CHUNK_LENGTH:,} characters",
        f"more than {tokens.MAX_EXACT_LENGTH:,} characters",
        f"{tokens.SAMPLE_CHUNKS} samples of {tokens.CHUNK_LENGTH:,} characters",
    ):
        assert shown in PAGE
    assert tokens.FILE_TOKENS == tokens.AUDIO_TOKENS
