"""Counting the tokens of wire items with any content."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from for_each import for_each
from kedge.usage.tokens import (
    AUDIO_TOKENS,
    FILE_TOKENS,
    IMAGE_TOKENS,
    ITEM_OVERHEAD,
    LOW_DETAIL_IMAGE_TOKENS,
    count_items,
    count_json,
    count_text,
)

TEXT = "What is the weather in Paris?"
TEXT_TOKENS = count_text(TEXT)

ROWS: list[tuple[dict[str, Any], int]] = [
    ({"role": "user", "content": TEXT}, TEXT_TOKENS),
    ({"type": "message", "role": "user", "content": [{"type": "input_text", "text": TEXT}]}, TEXT_TOKENS),
    ({"role": "assistant", "content": [{"type": "refusal", "refusal": TEXT}]}, TEXT_TOKENS),
    ({"type": "message", "role": "user", "content": []}, 0),
    ({"type": "message", "role": "user", "content": None}, 0),
    ({"role": "user", "content": [{"type": "input_image", "image_url": "data:…"}]}, IMAGE_TOKENS),
    ({"role": "user", "content": [{"type": "input_image", "detail": "low"}]}, LOW_DETAIL_IMAGE_TOKENS),
    ({"role": "user", "content": [{"type": "input_file", "file_data": "AAAA" * 999}]}, FILE_TOKENS),
    ({"role": "user", "content": [{"type": "input_audio"}, TEXT]}, AUDIO_TOKENS + TEXT_TOKENS),
    ({"type": "function_call", "call_id": "c", "name": TEXT, "arguments": TEXT}, 2 * TEXT_TOKENS),
    ({"type": "function_call_output", "call_id": "c", "output": TEXT}, TEXT_TOKENS),
    ({"type": "function_call_output", "output": [{"type": "input_text", "text": TEXT}]}, TEXT_TOKENS),
    ({"type": "custom_tool_call", "call_id": "c", "name": TEXT, "input": TEXT}, 2 * TEXT_TOKENS),
    ({"type": "reasoning", "summary": [{"type": "summary_text", "text": TEXT}]}, TEXT_TOKENS),
    ({"type": "reasoning", "summary": [], "encrypted_content": "A" * 160}, 30),
    ({"type": "reasoning", "content": [TEXT], "encrypted_content": "A" * 160}, TEXT_TOKENS),
    ({"type": "compaction", "encrypted_content": "A" * 160}, 30),
    ({"type": "search", "id": "s", "query": "x"}, count_json({"type": "search", "query": "x"})),
    ({"type": ["odd"], "status": "completed"}, count_json({"type": ["odd"]})),
    ({"role": "user", "content": {"type": "input_text", "text": TEXT}}, TEXT_TOKENS),
    ({"role": "user", "content": 12}, count_text("12")),
    ({"role": "user", "content": [{"type": "new", "x": {1}}, 3]}, count_text('{"type":"new","x":"{1}"}3')),
]  # fmt: skip


@for_each(("item", "tokens"), ROWS)
def test_item_count_is_texts_plus_overhead(item: dict[str, Any], tokens: int) -> None:
    """An item's count is its text as tiktoken counts it, the documented estimates, and an overhead."""
    assert count_items([item]) == ITEM_OVERHEAD + tokens


def test_item_with_a_cycle_has_a_count() -> None:
    """An item that cannot be written as JSON counts as its overhead only."""
    circle: dict[str, Any] = {"type": "new"}
    circle["self"] = circle
    assert count_items([circle]) == ITEM_OVERHEAD


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
odd_items = st.dictionaries(
    st.sampled_from(["type", "role", "content", "output", "summary", "name", "input", "x"]),
    st.sampled_from(["message", "reasoning", "function_call"]) | json_values,
)


@given(st.lists(odd_items, max_size=4), st.lists(odd_items, max_size=4))
def test_counts_of_any_items_add_up(
    left: list[dict[str, Any]], right: list[dict[str, Any]]
) -> None:
    """Counting does not raise for any items, and the count of joined lists is the sum of their counts."""
    assert count_items(left) + count_items(right) == count_items([*left, *right])
