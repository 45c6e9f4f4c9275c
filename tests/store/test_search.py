"""Full-text search: the same finds on every database."""

import pytest

from kedge import assistant, tool_call, tool_result, user
from kedge.store import Store
from store.sample_conversations import count_rows, create_conversation


async def test_words_are_found_whatever_their_case_and_accents(store: Store) -> None:
    """All words of a query must be there; the newest block comes first."""
    row, nodes = await create_conversation(store, 1)
    await store.append(
        row, nodes[-1], [user("Das CAFÉ in Zürich, am Fluß"), assistant("naïve 3.14")]
    )
    (hit,) = await store.search("cafe ZURICH")
    assert (hit.conversation, hit.kind) == (row.id, "user")
    assert "CAFÉ" in hit.excerpt
    assert [hit.kind for hit in await store.search("naive")] == ["assistant"]
    assert len(await store.search("talk 0")) == 2
    assert [hit.kind for hit in await store.search("talk 0", limit=1)] == ["assistant"]
    assert await store.search("cafe missing") == []


@pytest.mark.parametrize("query", ["", "  ", '"', "a OR", "NEAR(", "*", "col:x", "%_", "'; --"])
async def test_no_query_is_an_error(store: Store, query: str) -> None:
    """What people type is words, never a language."""
    await create_conversation(store, 1)
    assert await store.search(query) == []


async def test_tools_and_ideographs_are_found(store: Store) -> None:
    """Names and arguments of calls, results, and text that has no spaces."""
    row, nodes = await create_conversation(store, 0)
    blocks = [
        tool_call("get_weather", {"city": "Bergen"}, call_id="c"),
        tool_result("c", "rain"),
        user("北京天气"),
    ]
    await store.append(row, nodes[-1], blocks)
    for query, kind in (("bergen", "tool_call"), ("rain", "tool_result"), ("北京", "user")):
        assert [hit.kind for hit in await store.search(query)] == [kind]


async def test_the_index_catches_up(store: Store) -> None:
    """What was said since the last search is found by the next; nothing is indexed twice."""
    row, nodes = await create_conversation(store, 2)
    assert len(await store.search("question")) == 2
    await store.append(row, nodes[-1], [user("another question")], kept=1, kind="edited")
    assert len(await store.search("question")) == 3
    blocks, texts = await count_rows(store, "blocks", "texts")
    assert blocks == texts == 5


async def test_a_long_text_is_quoted_in_part(store: Store) -> None:
    """The excerpt is around what was found."""
    row, nodes = await create_conversation(store, 0)
    await store.append(row, nodes[-1], [user("before " * 100 + "needle" + " after" * 100)])
    (hit,) = await store.search("needle")
    assert "needle" in hit.excerpt
    assert hit.excerpt.startswith("…")
    assert hit.excerpt.endswith("…")
    assert len(hit.excerpt) < 150
