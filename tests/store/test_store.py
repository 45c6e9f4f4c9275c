"""The contract of a store, identical for every database."""

from collections.abc import Iterable
from typing import Any

import pytest

from for_each import for_each
from kedge import Conversation, assistant, image, user
from kedge.errors import (
    HeadConflict,
    InvalidSetting,
    InvalidTurn,
    InvalidType,
    KeyReused,
    NotInStore,
)
from kedge.planning import ConversationState, TokenCounts, get_state
from kedge.store import RequestRecord, Store, conversations
from kedge.store.database.transactions import Tx
from kedge.store.nodes import parse_position
from kedge.store.summaries import list_summaries, load_attached
from kedge.turns import FrozenMap, Turn, dumps, loads
from store.sample_conversations import SCOPE, count_rows, create_conversation


def make_digest(number: int) -> str:
    """Return a digest in the valid format."""
    return f"sha256:{number:064x}"


def make_response(number: int, **changes: Any) -> RequestRecord:
    """Return a response row with this number."""
    names = {"provider": "openai", "scope": SCOPE, "model": "gpt", "mode": "chained"}
    ids = {"provider_response_id": f"resp_{number}", "digest": make_digest(number)}
    counts = {"block_count": 2 * number, "depth": number, "created_at": 100.0 + number}
    return RequestRecord(**{**names, **ids, **counts, **changes})


async def test_token_counts_are_loaded(store: Store) -> None:
    """The counts of a response are read as they were stored; malformed ones count as missing."""
    counts = TokenCounts(1200, 900, 100, 0, 0, 1 << 47)
    row, (root,) = await create_conversation(store, 0)
    blocks = [user("question"), assistant("answer")]
    node = await store.append(row, root, blocks, response=make_response(1, counted=counts))
    assert (await store.load(row, node.id)).state.anchors[0].counted == counts
    assert (await store.responses(row))[0].counted == counts
    change = "UPDATE responses SET counted = ?"
    for stored in ("[1]", "[1, 2, 3, 4, 5, true]", "null", "[1,"):
        await store.database.write(lambda tx, stored=stored: tx.run(change, (stored,)))
        assert (await store.load(row, node.id)).state.anchors[0].counted is None
        assert (await store.responses(row))[0].counted is None


EVERY_KIND = """{"format": "kedge.turn", "version": 2, "blocks": [
    {"kind": "system", "text": "s", "role": "developer", "id": "1"},
    {"kind": "user", "id": "2", "parts": [
        {"type": "image", "url": "u"}, {"type": "text", "text": "x"}]},
    {"kind": "reasoning", "id": "3", "summary": ["a"], "encrypted_content": "e"},
    {"kind": "tool_call", "id": "4", "call_id": "c", "name": "f", "arguments": "{}", "custom": true},
    {"kind": "tool_result", "id": "5", "call_id": "c", "custom": true, "parts": [
        {"type": "text", "text": "\\u0000"}]},
    {"kind": "opaque", "id": "6", "item": {"type": "web_search_call", "n": 12345678901234567890}},
    {"kind": "novel", "id": "7", "plot": {"a": [true, null, 1.5]}},
    {"kind": "assistant", "id": "8", "mood": "fine", "parts": [
        {"type": "refusal", "text": "no"}]}]}"""


async def test_appended_blocks_are_loaded(store: Store) -> None:
    """Loaded blocks equal the appended ones, with their ids and metadata."""
    row, (node,) = await create_conversation(store, 0)
    question = user("Hello", id="blk_1", metadata={"mine": [1, None, {"é": "ü"}]})
    await store.append(row, node, [question, assistant("Hi")], head=node.id)
    loaded = await store.load(await store.conversation(row.id))
    assert loaded.blocks == (question, assistant("Hi"))
    assert (loaded.blocks[0].id, loaded.blocks[0].metadata) == ("blk_1", question.metadata)
    assert loaded.turn("t").id == "t"


async def test_blocks_of_every_kind_are_loaded(store: Store) -> None:
    """Blocks of all kinds, also those that this version does not know, are the same after loading."""
    turn = loads(EVERY_KIND)
    row, (root,) = await create_conversation(store, 0)
    node = await store.append(row, root, turn.blocks)
    loaded = (await store.load(row, node.id)).turn(turn.id)
    assert dumps(loaded.with_data({"kedge.state": None})) == dumps(Turn(turn.blocks, id=turn.id))


async def test_anchor_of_a_response_is_loaded(store: Store) -> None:
    """A response is an anchor of the nodes after it, and not of those before it."""
    row, (root,) = await create_conversation(store, 0)
    response = make_response(1)
    await store.append(row, root, [user("a"), assistant("b")], response=response, head=root.id)
    loaded = await store.load(await store.conversation(row.id))
    assert loaded.state.anchors == (response.anchor_record,)
    _, before = await store.load_turn(row, root.id, known=loaded.node, turn=loaded.turn())
    assert get_state(before) == ConversationState()


async def test_mode_and_data_of_a_node_are_loaded(store: Store) -> None:
    """A node has the state and the data of its Turn, which the nodes before it do not have."""
    row, (root,) = await create_conversation(store, 0)
    state = ConversationState("conversation", "resp_1", "conv_9")
    data = FrozenMap({"topic": "cats"})
    node = await store.append(row, root, [user("a")], memory=state, data=data)
    turn = (await store.load(row, node.id)).turn()
    assert (get_state(turn), turn.data["topic"]) == (state, "cats")
    _, before = await store.load_turn(row, root.id, known=node, turn=turn)
    assert "topic" not in before.data
    assert get_state(before) == (await store.load(row, root.id)).state


async def test_conversation_is_created_with_its_first_blocks(store: Store) -> None:
    """The first blocks are a node after the root; a second conversation with this id is not created."""
    row = await store.create(blocks=[user("a"), assistant("b")])
    loaded = await store.load(row)
    assert (loaded.node.kind, loaded.blocks) == ("added", (user("a"), assistant("b")))
    with pytest.raises(InvalidSetting):
        await store.create(id=row.id, blocks=[user("c")])
    assert len(await store.tree(row)) == 2


async def test_response_row_round_trip(store: Store) -> None:
    """Every member of a response row is stored and loaded."""
    row, (node,) = await create_conversation(store, 0)
    counts = """sent_blocks sent_bytes saved_blocks saved_bytes input_tokens cached_tokens output_tokens
        reasoning_tokens predicted_cached_tokens cache_write_tokens more_rejected start barrier"""
    times = {"first_token_seconds": 0.5, "seconds": 1.5, "expires_at": 1e9, "root_created_at": 50.0}
    texts = {"anchor": "resp_0", "reason": "changed", "healed": "gone", "lost_reason": "gone"}
    full = make_response(
        1, status="incomplete", error="max_output_tokens", stored=False, derived=("a", "b"), omitted=(2,),
        cost=0.25, cache_savings=0.125, **times, **texts,
        **{name: number for number, name in enumerate(counts.split(), 1)},
    )  # fmt: skip
    appended = await store.append(row, node, [assistant("Hi")], response=full)
    (stored,) = await store.responses(row)
    assert (stored.node, stored.parent, stored.conversation) == (appended.id, node.id, row.id)
    for member in set(RequestRecord.__struct_fields__) - {"node", "parent", "conversation"}:
        assert getattr(stored, member) == getattr(full, member), member
    assert await store.responses(since=200.0) == []
    assert await store.responses(since=101.0, until=102.0) == [stored]


async def test_invalid_text_is_rejected(store: Store) -> None:
    """No database can compare or store such a text; the error says so, and the store remains usable."""
    row, _ = await create_conversation(store, 0)
    name = "conv_\ud800"
    for call in (store.conversation(name), store.conversations(tag=name), store.delete(name)):
        with pytest.raises(InvalidSetting, match="lone surrogate; remove it"):
            await call
    for title in ("a\0b", "\ud800"):
        with pytest.raises((InvalidSetting, ValueError)):
            await store.create(title)
    assert (await store.conversation(row.id)).number == row.number


async def test_blank_title_is_no_title(store: Store) -> None:
    """A title of only spaces, which nobody could see or name, is stored as none."""
    row = await store.create(" \n")
    assert row.title == ""
    await store.update(row.id, title="Sums")
    assert (await store.update(row.id, title=" ")).title == ""
    assert (await store.fork(row, row.head, " ")).title == ""


async def test_head_conflict_creates_a_branch(store: Store) -> None:
    """The second of two concurrent writers gets `HeadConflict` with the node of its own branch."""
    row, (root,) = await create_conversation(store, 0)
    first = await store.append(row, root, [user("one")], head=root.id)
    with pytest.raises(HeadConflict) as conflict:
        await store.append(row, root, [user("two")], head=root.id)
    assert conflict.value.head == first.id
    assert (await store.conversation(row.id)).head == first.id
    lost = await store.load(row, conflict.value.node)
    assert lost.blocks == (user("two"),)
    assert (await store.load(row, first.id)).blocks == (user("one"),)
    with pytest.raises(HeadConflict):
        await store.move_head(row, lost.node, head=root.id)
    await store.move_head(row, lost.node, head=first.id)
    assert (await store.conversation(row.id)).head == lost.node.id


async def test_an_id_that_is_on_the_path_is_rejected(store: Store) -> None:
    """Nothing is written if the path would have two blocks with one id, on any branch; other paths may have the id."""
    row, (root,) = await create_conversation(store, 0)
    first = await store.append(row, root, [user("one", id="a"), assistant("1", id="b")])
    second = await store.append(row, first, [user("two", id="c" * 5000), user("nul", id="d\0")])
    edited = await store.append(row, second, [user("other", id="e")], kept=1, kind="edited")
    before = await count_rows(store, "nodes", "links", "blocks")
    for parent, block_id in (
        (first, "a"),
        (second, "b"),
        (second, "c" * 5000),
        (second, "d\0"),
        (edited, "a"),
    ):
        with pytest.raises(InvalidTurn, match=f"path to node {parent.id} has a block with the id"):
            await store.append(row, parent, [user("new"), user("again", id=block_id)])
    with pytest.raises(InvalidTurn, match="two of the new blocks have the id 'n'"):
        await store.append(row, first, [user("x", id="n"), user("y", id="n")])
    assert await count_rows(store, "nodes", "links", "blocks") == before
    rewritten = await store.append(row, second, [user("two, again", id="b")], kept=1, kind="edited")
    sibling = await store.append(row, edited, [user("two", id="b")])
    for node in (rewritten, sibling):
        assert (await store.load(row, node.id)).turn().blocks[-1].id == "b"
    other, (start,) = await create_conversation(store, 0)
    await store.append(other, start, [user("one", id="a")])
    assert await store.verify() == []


async def test_blocks_are_found_by_their_id(store: Store) -> None:
    """A block with large content is found by its id in its tree only, in each of its versions."""
    large = image(b"\x89PNG\r\n\x1a\n" + bytes(20_000))
    question = user(["What is this?", large], id='a "quoted" id\0' + "x" * 5000)
    row = await store.create(blocks=[question])
    loaded = await store.load(row)
    assert await load_attached(store, row, question.id) == [question]
    changed = user(["And this?", large], id=question.id)
    await store.append(row, loaded.node, [changed], kept=0, kind="edited")
    assert await load_attached(store, row, question.id) == [question, changed]
    assert await load_attached(store, row, question.id[:-1]) == []
    other = await store.create(blocks=[user("Hello")])
    assert await load_attached(store, other, question.id) == []


async def test_branches_are_compared(store: Store) -> None:
    """Two branches have a common ancestor, and their differences are the blocks after it."""
    row, nodes = await create_conversation(store, 3)
    left = await store.append(row, nodes[2], [user("left")])
    right = await store.append(row, nodes[2], [user("right"), assistant("yes")])
    assert (await store.common_ancestor(row, left.id, right.id)).id == nodes[2].id
    differences = await store.differences(row, left.id, right.id)
    assert (differences.shared, differences.left) == (4, (user("left"),))
    assert differences.right == (user("right"), assistant("yes"))
    longer = await store.differences(row, nodes[1].id, nodes[3].id)
    assert (longer.shared, longer.left, len(longer.right)) == (2, (), 4)
    same = await store.differences(row, left.id, left.id)
    assert (same.shared, same.left, same.right) == (5, (), ())


async def test_anchor_is_found_by_content_in_its_scope(store: Store) -> None:
    """Responses are found by scope and digest, and another scope returns none."""
    row, _ = await create_conversation(store, 3)
    known = [record.digest for record in (await store.load(row)).state.anchors]
    (record,) = await store.find_anchors(SCOPE, [make_digest(9), known[1]])
    assert (record.response_id, record.block_count) == ("resp_A_talk_1", 4)
    assert await store.find_anchors(SCOPE.replace("0123", "9999"), known) == []
    assert await store.find_anchors(SCOPE, [make_digest(7)]) == []
    many = [make_digest(number) for number in range(1500, 0, -1)]
    assert len(await store.find_anchors(SCOPE, [*many, *known])) == 3


async def test_response_is_marked_lost_once(store: Store) -> None:
    """A lost response has the reason of the first report, and is no longer a candidate."""
    row, _ = await create_conversation(store, 2)
    record = (await store.load(row)).state.anchors[1]
    assert await store.mark_lost(record, "gone")
    assert not await store.mark_lost(record, "again")
    lost = (await store.responses(row))[1]
    assert (lost.status, lost.lost_reason) == ("lost", "gone")
    assert await store.find_anchors(SCOPE, [record.digest]) == []
    state = (await store.load(row)).state
    assert [anchor.status for anchor in state.anchors] == ["completed", "lost"]
    assert state.previous_response_id == state.anchors[0].response_id


async def test_content_index_respects_retention(store: Store) -> None:
    """An anchor, and a candidate of another conversation, expires by the shortest retention of those it has."""
    row = await store.create(retention=60.0)
    root = (await store.load(row)).node
    response = make_response(1, expires_at=1e9)
    node = await store.append(row, root, [user("a")], response=response)
    assert (await store.load(row, node.id)).state.anchors[0].expires_at == 161.0
    for retention, expires in ((None, 161.0), (30.0, 131.0), (90.0, 161.0)):
        (record,) = await store.find_anchors(SCOPE, [make_digest(1)], retention=retention)
        assert record.expires_at == expires


async def test_invalid_settings_are_rejected(store: Store) -> None:
    """Invalid settings raise `InvalidSetting` before anything is written."""
    invalid: list[Any] = [-5, 0, float("nan"), float("inf"), 10**400, "60", True]
    settings: dict[str, Any]
    for settings in ({"mode": "bogus"}, *({"retention": each} for each in invalid)):
        with pytest.raises(InvalidSetting, match=next(iter(settings))):
            await store.create(**settings)
    assert await store.conversations() == []


async def list_ids(store: Store, **filters: Any) -> list[str]:
    """Return the ids of the conversations in a list."""
    return [row.id for row in await store.conversations(**filters)]


async def test_conversations_are_listed_by_change(store: Store) -> None:
    """The conversation that was changed last is the first of the list, which has pages."""
    names: list[str] = []
    for number in range(3):
        store.clock = lambda number=number: 100.0 + number
        names.append((await store.create()).id)
    one, two, three = names
    store.clock = lambda: 200.0
    assert (await store.update(one, title="after")).updated_at == 200.0
    assert await list_ids(store) == [one, three, two]
    pages = [await list_ids(store, limit=2, offset=offset) for offset in (0, 2, 4)]
    assert pages == [[one, three], [two], []]


async def test_conversations_are_listed_by_time(store: Store) -> None:
    """A list has the changes from one time on, and before another."""
    names: list[str] = []
    for number in range(3):
        store.clock = lambda number=number: 122.0 + number
        names.append((await store.create()).id)
    rows = await Conversation.list(store, since=123.0, before=124.0)
    assert [row.id for row in rows] == [names[1]]


async def test_conversations_are_listed_by_tag(store: Store) -> None:
    """Tags are sorted and unique, and replaced as a whole."""
    one = await store.create("One", tags=["work", "work", "home"])
    two = await store.create("Two")
    assert one.tags == ("home", "work")
    await store.update(two.id, tags=["x"])
    assert await list_ids(store, tag="home") == [one.id]
    assert await list_ids(store, tag="x") == [two.id]


async def test_archived_conversations_are_listed_on_request(store: Store) -> None:
    """A list has the conversations that are not archived, those that are, or both."""
    one = await store.create("One")
    two = await store.create("Two")
    await store.update(two.id, archived=True)
    await store.update(one.id, title="First", archived=None)  # which changes nothing else
    assert await list_ids(store) == [one.id]
    assert await list_ids(store, archived=True) == [two.id]
    assert set(await list_ids(store, archived=None)) == {one.id, two.id}


async def test_fork_has_the_members_of_its_origin(store: Store) -> None:
    """A fork begins with the tags and the data of its origin, and a time of its own."""
    origin = await store.create("One", tags=["home"], data={"a": [1]})
    store.clock = lambda: 123.0
    fork = await store.fork(origin, origin.head)
    assert (fork.created_at, fork.tags) == (123.0, ("home",))
    assert origin.data == FrozenMap({"a": [1]})


@for_each("time", [10**30, float("nan"), "2026"])
async def test_times_that_no_database_can_compare_are_rejected(store: Store, time: Any) -> None:
    """The times of lists, searches and scheduled deletions are finite numbers."""
    row = await store.create()
    for call in (
        lambda: store.conversations(since=time),
        lambda: store.conversations(before=time),
        lambda: list_summaries(store, since=time),
        lambda: store.responses(until=time),
        lambda: store.search("word", until=time),
        lambda: store.schedule_delete(row, time),
    ):
        with pytest.raises(InvalidSetting, match=r"must be (a finite time|float)"):
            await call()


async def test_tags_of_an_iterator_are_kept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the transaction of an update is repeated, the tags are those that were given."""
    row, set_tags, attempts = await store.create("One"), conversations.set_tags, list[int]()

    def set_tags_with_conflict(tx: Tx, number: int, tags: Iterable[str]) -> None:
        attempts.append(number)
        for _ in range(2 if len(attempts) == 1 else 1):  # the same tags twice violate a unique key
            set_tags(tx, number, [*tags, "same"])

    monkeypatch.setattr(conversations, "set_tags", set_tags_with_conflict)
    assert (await store.update(row, tags=iter(["given"]))).tags == ("given", "same")
    assert len(attempts) == 2


async def test_missing_rows_raise(store: Store) -> None:
    """An unknown conversation, a node of another one and numbers that no node has raise `NotInStore`."""
    row, _ = await create_conversation(store, 0)
    _, (root,) = await create_conversation(store, 0)
    with pytest.raises(NotInStore, match="there is no conversation 'conv_nothing'"):
        await store.conversation("conv_nothing")
    numbers = (root.id, 10**6, -1, 10**30)
    for at in numbers:
        for call in (store.load, store.node, store.path, store.children, store.newest_below):
            with pytest.raises(NotInStore, match="there is no node"):
                await call(row, at)
        with pytest.raises(NotInStore):
            await store.fork(row, at)
    for position in (*numbers, str(row.head), "9" * 5000, ""):
        with pytest.raises(NotInStore, match="no node"):
            await store.find_node(row, position)


async def test_positions_of_a_wrong_type_are_named(store: Store) -> None:
    """What is no number of a node is an error that names the argument."""
    row, _ = await create_conversation(store, 0)
    wrong: list[Any] = [1.5, True, str(row.head)]
    for at in wrong:
        for call in (store.load, store.node, store.path, store.children, store.newest_below):
            with pytest.raises(InvalidType, match="node must be int"):
                await call(row, at)
        with pytest.raises(InvalidType, match="at must be int"):
            await store.fork(row, at)


def test_positions_are_parsed() -> None:
    """A text is the number of a node, unless it is too long for one."""
    assert [parse_position(text) for text in ("", "head", "7", "9" * 101)] == [
        *("head", "head", 7, "9" * 101)
    ]


async def test_the_longest_names_are_stored(store: Store) -> None:
    """An id, a tag and a key of 400 characters, each of four bytes, can be stored in every database."""
    name = "".join(map(chr, range(0x1F300, 0x1F300 + 400)))  # which cannot be compressed well
    row = await store.create(id=name, tags=[name])
    assert (await store.conversation(name)).tags == (name,)
    assert await store.claim(row, name, request_hash=b"x", owner="b", lease=9.0)
    with pytest.raises(InvalidSetting, match="key must have at most 400 characters"):
        await store.claim(row, name + "x", request_hash=b"x", owner="b", lease=9.0)


async def test_a_response_id_of_digits_is_no_node_number(store: Store) -> None:
    """The response of a server that counts its responses is found by its id, not the node with this number."""
    row, nodes = await create_conversation(store, 1)
    number = nodes[0].id
    response = make_response(1, provider_response_id=str(number))
    answer = await store.append(
        row, nodes[1], [assistant("Again")], response=response, head=nodes[1].id
    )
    assert await store.find_node(row, str(number)) == answer
    again = await store.append(row, nodes[1], [assistant("Once more")], response=response)
    assert await store.find_node(row, str(number)) == again  # the newest of several
    assert await store.find_node(row, number) == nodes[0]


async def test_tags_are_read_in_queries(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tags are read in several queries, because databases limit the values of one."""
    monkeypatch.setattr("kedge.store.database.transactions.MAX_VALUES", 2)
    made = [await store.create(tags=[f"tag {number}"]) for number in range(5)]
    assert sorted(row.tags for row in await store.conversations()) == [row.tags for row in made]
    assert len(await store.path(made[0], limit=10**30)) == 1


async def test_key_is_claimed_once(store: Store) -> None:
    """A key has one owner until its lease ends, and all callers finally get the same answer."""
    row, (root,) = await create_conversation(store, 0)
    claim = await store.claim(row, "k", request_hash=b"x", owner="a", lease=1000)
    assert claim.is_owner
    assert not (await store.claim(row, "k", request_hash=b"x", owner="b", lease=1000)).is_owner
    with pytest.raises(KeyReused):
        await store.claim(row, "k", request_hash=b"other", owner="b", lease=1000)
    question = await store.append(row, root, [user("q")], kind="asked", key="k")
    assert await store.renew(row, "k", owner="a", lease=0)
    claimed = await store.claim(row, "k", request_hash=b"x", owner="b", lease=1000)
    assert (claimed.is_owner, claimed.question) == (True, question.id)
    assert not await store.renew(row, "k", owner="a", lease=1000)
    answer = await store.append(row, question, [assistant("a")], kind="answered")
    await store.settle(row, "k", answer.id)
    await store.settle(row, "k", question.id)  # the first answer remains
    done = await store.claim(row, "k", request_hash=b"x", owner="c", lease=1000)
    assert (done.is_owner, done.answer) == (False, answer.id)
