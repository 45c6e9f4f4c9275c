"""The documentation page on counting tokens matches the code."""

from pathlib import Path

from kedge.tokens import counter, items

PAGE = (Path(__file__).parents[2] / "docs" / "tokens.md").read_text(encoding="utf-8")


def test_documented_numbers_match_the_code() -> None:
    """The page states the estimates and limits of the code."""
    for shown in (
        f"| overhead of an item (start, role, end) | {items.ITEM_OVERHEAD} |",
        f'| an image | {items.IMAGE_TOKENS}, or {items.LOW_DETAIL_IMAGE_TOKENS} with `detail: "low"` |',
        f"| a file, an audio clip | {items.FILE_TOKENS:,} |",
        f"more than {counter.MAX_BLANK_RUN:,} blanks",
        f"every {counter.CHUNK_LENGTH:,} characters",
        f"more than {counter.MAX_EXACT_LENGTH:,} characters",
        f"{counter.SAMPLE_CHUNKS} samples of {counter.CHUNK_LENGTH:,} characters",
    ):
        assert shown in PAGE
    assert items.FILE_TOKENS == items.AUDIO_TOKENS
