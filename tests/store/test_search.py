"""Full-text search, with the same results on every database."""

from typing import Any, cast

import pytest

from kedge import assistant, tool_call, tool_result, user
from kedge.errors import InvalidSetting
from kedge.store import Damage, Store
from kedge.store.search import insert_texts
from store.sample_conversations import count_rows, create_conversation


async def test_search_ignores_case_and_accents(store: Store) -> None:
    """All terms of a query must be in a text, whatever their case and accents."""
    row = await store.create(blocks=[user("Das CAFÉ in Zürich, am Fluß"), assistant("naïve 3.14")])
    (hit,) = await store.search("cafe ZURICH")
    assert (hit.conversation, hit.kind) == (row.id, "user")
    assert [hit.kind for hit in await store.search("naive")] == ["assistant"]
    assert await store.search("cafe missing") == []


async def test_newest_texts_are_found_first(store: Store) -> None:
    """A limit leaves out the oldest hits."""
    await create_conversation(store, 1)
    assert [hit.kind for hit in await store.search("talk 0")] == ["assistant", "user"]
    assert [hit.kind for hit in await store.search("talk 0", limit=1)] == ["assistant"]


async def test_search_covers_tools_and_other_scripts(store: Store) -> None:
    """The arguments and results of tools are found, and words without spaces between them."""
    blocks = [
        tool_call("get_weather", {"city": "Bergen"}, call_id="c"),
        tool_result("c", "rain"),
        user("北京天气"),
    ]
    await store.create(blocks=blocks)
    for query, kind in (("bergen", "tool_call"), ("rain", "tool_result"), ("北京", "user")):
        assert [hit.kind for hit in await store.search(query)] == [kind]


async def test_excerpt_shows_the_match(store: Store) -> None:
    """An excerpt is short, has the text as it is stored, and shows where it was cut."""
    await store.create(blocks=[user("before " * 100 + "NÉEDLE" + " after" * 100)])
    (hit,) = await store.search("needle")
    assert "NÉEDLE" in hit.excerpt
    assert hit.excerpt.startswith("…")
    assert hit.excerpt.endswith("…")
    assert len(hit.excerpt) < 150


async def test_unusual_query_is_not_an_error(store: Store) -> None:
    """A query of only punctuation and operators returns no hits and raises no error."""
    await create_conversation(store, 1)
    for query in ("", "  ", '"', "OR", "NOT talk", "NEAR(", "*", "col:x", "%_", "'; --"):
        assert await store.search(query) == [], query


TEXTS = {
    "a": "The sea is blue, the sky is blue",
    "b": "blue sea and a storm in the North Sea, with much else that is not blue at all " * 5,
    "c": "Seafarers sail; stormy weather",
    "d": "红色的 sea 北京天气",
}
QUERIES = [
    ("blue sea", "ba"), ('"blue sea"', "b"), ('"sea is BLUE"', "a"), ('"sea blue"', ""), ("sea*", "dcba"),
    ("storm*", "cb"), ('"north sea*', "b"), ("storm", "b"), ("sky OR stormy", "ca"),
    ("sky OR stormy blue OR 天气", "da"), ("sea -blue", "d"), ("sea NOT blue", "d"),
    ('blue AND sea NOT "north sea"', "a"), ('sea -"sky is"', "db"), ("storm* -stormy", "b"), ('"sea 北京"', "d"),
    ('"色的 sea"', "d"), ("北京*", "d"), ("blue OR", "ba"), ("blue NOT", "ba"), ("OR blue", "ba"),
    ("-blue OR sky", "a"), ("north-sea", "b"),
]  # fmt: skip


async def test_phrases_prefixes_alternatives_and_exclusions(store: Store) -> None:
    """Query operators give the same hits on every database, and the excerpt shows the first match."""
    await store.create(blocks=[user(text, id=name) for name, text in TEXTS.items()])
    for query, expected in QUERIES:
        block_ids = "".join(hit.block_id for hit in await store.search(query))
        assert block_ids == expected, query
    (hit,) = await store.search('"blue at all blue"')
    assert hit.excerpt.startswith("…")
    assert "blue at all blue" in hit.excerpt


async def test_hits_are_ranked_and_paginated(store: Store) -> None:
    """Ranked order lists a text with more matches first, and each page begins after the previous one."""
    await store.create(blocks=[user(text, id=name) for name, text in TEXTS.items()])
    ranked = await store.search("blue OR sea", order="rank")
    assert "".join(hit.block_id for hit in ranked) == "bad"
    assert [hit.score for hit in ranked] == sorted((hit.score for hit in ranked), reverse=True)
    pages = [await store.search("blue OR sea", limit=2, offset=offset) for offset in (0, 2, 4)]
    assert ["".join(hit.block_id for hit in page) for page in pages] == ["db", "a", ""]
    (second,) = await store.search("blue OR sea", order="rank", limit=1, offset=1)
    assert second == ranked[1]
    with pytest.raises(InvalidSetting, match="order must be one of newest, rank"):
        await store.search("sea", order=cast("Any", "best"))
    with pytest.raises(InvalidSetting, match="offset must be an integer of at least 0"):
        await store.search("sea", offset=-1)
    with pytest.raises(InvalidSetting, match="limit must be an integer of at least 0"):
        await store.search("sea", limit=-1)


async def test_an_unknown_role_is_rejected(store: Store) -> None:
    """A search for a kind of block that does not exist is an error, not a search without hits."""
    with pytest.raises(InvalidSetting, match=r"role must be one of user, assistant, .*not 'humna'"):
        await store.search("sea", role="humna")


async def test_hits_are_filtered_by_role_tag_and_time(store: Store) -> None:
    """Search filters by role, tag and time, and a fork is matched by its own tags."""
    row, nodes = await create_conversation(store, 1)
    store.clock = lambda: 5000.0
    await store.append(row, nodes[-1], [user("talk", id="new")])
    fork = await store.fork(row, nodes[-1].id)
    await store.update(fork, tags=["sea"])
    assert {hit.kind for hit in await store.search("talk", role="user")} == {"user"}
    assert {hit.conversation for hit in await store.search("talk", tag="sea")} == {fork.id}
    assert await store.search("talk", tag="land") == []
    (hit,) = await store.search("talk", since=5000.0, until=5001.0)
    assert (hit.block_id, hit.created_at) == ("new", 5000.0)
    assert "new" not in {hit.block_id for hit in await store.search("talk", until=5000.0)}


UNSPACED = [
    ("학교에서 친구를 만났다", ["학교", "친구", "만났", "학교 친구"], ["교학", "학친"]),
    ("ฉันชอบกินข้าวผัดที่กรุงเทพ", ["ข้าวผัด", "กรุงเทพ", "กิน ฉัน"], ["เทพกรุง", "ผัดข้าว"]),
    ("我明天去北京看天气预报", ["北京", "天气", "天", "北京 明天"], ["京北", "天北", "气天"]),
    ("カタカナとひらがな", ["カタ", "ひらがな"], ["タカタ", "がなひ"]),
    ("Well done 👍🏽🎉 for ❤️ 🇳🇴", ["👍", "👍🏽🎉", "🎉", "❤️", "❤", "🇳🇴", "done 👍"], ["🎉👍", "😀"]),
    ("हिन्दी में लिखा", ["हिन्दी", "लिखा"], ["हिन", "लख"]),
]  # fmt: skip


async def test_scripts_without_spaces(store: Store) -> None:
    """A substring of text without spaces is found in its character order only and is in the excerpt."""
    for text, found, missing in UNSPACED:
        row = await store.create(blocks=[user(f"{'。' * 200}{text}")])
        for query in found:
            (hit,) = await store.search(query)
            assert text[:5] in hit.excerpt
        for query in missing:
            assert await store.search(query) == [], query
        await store.delete(row)


async def test_forks_are_found_by_shared_text(store: Store) -> None:
    """A fork is found by text before its branching point, and not by later text of the original."""
    row, nodes = await create_conversation(store, 3)
    fork = await store.fork(row, nodes[1].id)
    short = await store.append(fork, nodes[3], [user("elsewhere")], kept=3)
    names = {
        text: [hit.conversation for hit in await store.search(f"question {text}")]
        for text in ("0", "1", "2")
    }
    assert names == {"0": [row.id, fork.id], "1": [row.id, fork.id], "2": [row.id]}
    (hit,) = await store.search("elsewhere")
    assert (hit.conversation, hit.node) == (fork.id, short.id)
    assert [hit.conversation for hit in await store.search("answer 1")] == [row.id]


async def test_damaged_index_is_repaired(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` reports text missing from the search index, and `gc` indexes it again."""
    monkeypatch.setattr("kedge.store.search.OVERLAP", 0)
    await create_conversation(store, 2)
    assert len(await store.search("question")) == 2
    await store.database.write(lambda tx: tx.run("DELETE FROM texts WHERE rowid = 1"))
    assert await store.verify() == [Damage("block 1", "it is missing in the search index")]
    await store.database.write(lambda tx: insert_texts(tx, {999: "lost"}))
    assert len(await store.verify()) == 2
    await store.gc()
    assert len(await store.search("question")) == 2
    assert await store.verify() == []


async def test_index_is_updated_by_next_search(store: Store) -> None:
    """The next search indexes each added block once, a very long one up to a limit."""
    row, nodes = await create_conversation(store, 2)
    assert len(await store.search("question")) == 2
    await store.append(row, nodes[-1], [user("another question")], kept=1, kind="edited")
    assert len(await store.search("question")) == 3
    blocks, texts = await count_rows(store, "blocks", "texts")
    assert blocks == texts == 5
    text = " ".join(f"{number:x}word" for number in range(150_000))
    await store.create(blocks=[user(f"first {text} {'x' * 5000}")])
    assert len(await store.search("first 1f4word")) == 1
