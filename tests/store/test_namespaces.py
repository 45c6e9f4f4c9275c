"""Isolation of namespaces: no method of a store returns or changes data of another namespace."""

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kedge import Conversation, assistant, user
from kedge.analytics import Selection, analyze, analyze_conversations, analyze_over_time
from kedge.chaining.index import StoreIndex
from kedge.errors import InvalidSetting, NotInStore
from kedge.store import (
    ConversationRow,
    Incident,
    Node,
    ProxiedRequest,
    RequestRecord,
    Store,
    StoredExchange,
    Telemetry,
    open_store,
    proxied_requests,
    search,
)
from kedge.store.response_index import select_all_evidence
from kedge.store.summaries import (
    LIST_FILTERS,
    LIST_ORDERS,
    find_by_title,
    get_revision,
    list_labels,
    list_summaries,
    load_attached,
    load_exchanges,
)
from kedge.store.tree import list_tree_conversations, load_last_blocks, read_tree
from store.row_calls import ROW_CALLS
from store.sample_conversations import SCOPE, create_conversation

PROXIED = ProxiedRequest(1.0, "m", 200, "", "resp_p", 1, 1, 10, 10, upstream="https://host/v1")
EXCHANGE = StoredExchange(b"secret request", b"secret reply", 200, 1.0)


@dataclass
class Owner:
    """A store bound to one user, with one conversation and its nodes."""

    store: Store
    row: ConversationRow
    nodes: list[Node]
    digest: str


async def fill(store: Store, name: str) -> Owner:
    """Store one record of each kind in a namespace; ids and texts are equal in all namespaces."""
    bound = store.use_namespace(name)
    bound.keep_bodies = True
    row, nodes = await create_conversation(bound, 2, id="shared", tags=["topic"], ttl=1e6)
    await bound.note(row, nodes[-1].id, Telemetry(exchanges=(EXCHANGE,)))
    await bound.add_proxied([PROXIED])
    await bound.save_evidence("server key", {"owner": name})
    await bound.claim(row, "k", request_hash=b"about", owner="a", lease=1e6)
    digest = (await bound.load(row)).state.anchors[-1].digest
    return Owner(bound, row, nodes, digest)


Call = Callable[[Store, Owner], Awaitable[Any]]


EMPTY_METHODS: dict[str, tuple[Call, Any]] = {
    "conversations": (lambda s, _: s.conversations(archived=None), []),
    "responses": (lambda s, _: s.responses(), []),
    "find_anchors": (lambda s, o: s.find_anchors(SCOPE, [o.digest]), []),
    "search": (lambda s, _: s.search("question"), []),
    "search by rank": (lambda s, _: s.search("question OR answer", order="rank"), []),
    "list_scheduled": (lambda s, _: s.list_scheduled(), []),
    "delete_scheduled": (lambda s, o: s.delete_scheduled(o.row), False),
    "delete_expired": (lambda s, _: s.delete_expired(), []),
    "list_older": (lambda s, _: s.list_older(1e-6), []),
    "delete_older": (lambda s, _: s.delete_older(1e-6), []),
    "list_proxied": (lambda s, _: s.list_proxied(), []),
    "load_evidence": (lambda s, _: s.load_evidence("server key"), None),
    "list_expired": (lambda s, _: s.list_expired(), []),
    "list_unused_objects": (lambda s, _: s.list_unused_objects(), []),
    "take_unused_objects": (lambda s, _: s.take_unused_objects("server", 10), []),
    "gc": (lambda s, _: s.gc(), 0),
}
"""Calls that must return the result of an empty store."""

OTHER_METHODS = {
    # Tested below.
    "insert",
    "conversation", "create", "create_titled", "create_all", "import_", "add_proxied", "get_proxied", "sum_proxied",
    "export_proxied",
    "save_evidence", "claim_object", "release_object", "delete_object", "mark_lost", "mark_unknown",
    "use_namespace", "namespaces", "verify",
    # Without content of conversations.
    "aclose", "database_time", "get_queue", "read", "write",
}  # fmt: skip


def test_every_public_method_is_covered() -> None:
    """Every public method of `Store` has an entry in one of the tables of this file."""
    methods = {
        name
        for name, _ in inspect.getmembers(Store, inspect.isfunction)
        if not name.startswith("_")
    }
    assert not methods - {*ROW_CALLS, *EMPTY_METHODS, *OTHER_METHODS}


@pytest.fixture
async def alice(store: Store) -> Owner:
    """Return a namespace with content."""
    return await fill(store, "alice")


@pytest.fixture(params=["bob", ""])
def other(request: pytest.FixtureRequest, store: Store) -> Store:
    """Return the store of another user, and the one of the default namespace."""
    return store.use_namespace(request.param) if request.param else store


async def test_other_namespaces_list_nothing(other: Store, alice: Owner) -> None:
    """Lists and searches of another namespace are empty."""
    assert await list_summaries(other, show="all") == ([], 0)
    assert await list_summaries(other, show="all", ids=["shared"]) == ([], 0)
    assert await list_labels(other) == ([], [])
    assert await find_by_title(other, "talk", 10) == []
    for name, (call, expected) in EMPTY_METHODS.items():
        assert await call(other, alice) == expected, name


async def test_other_namespaces_read_nothing(other: Store, alice: Owner) -> None:
    """The conversations, nodes and blocks of a user do not exist for another one."""
    assert await load_exchanges(other, alice.nodes[-1].id) == []
    assert len(await load_exchanges(alice.store, alice.nodes[-1].id)) == 1
    for read in (read_tree, load_last_blocks, list_tree_conversations):
        with pytest.raises(NotInStore):
            await read(other, alice.row)
    with pytest.raises(NotInStore):
        await load_attached(other, alice.row, "blk")
    for row_call in ROW_CALLS.values():
        with pytest.raises(NotInStore):
            await row_call(other, alice.row, alice.nodes[-1])
    for attempt in (other.conversation, other.delete, other.update):
        with pytest.raises(NotInStore, match="there is no conversation 'shared'"):
            await attempt("shared")


async def test_other_namespaces_count_nothing(other: Store, alice: Owner) -> None:
    """Statistics and the revision are those of a namespace."""
    assert await get_revision(other) == (0, 0)
    analytics = await analyze(other)
    counts = (analytics.requests.total, analytics.chains.count, analytics.branching.points)
    assert (counts, analytics.models) == ((0, 0, 0), ())
    assert await analyze_over_time(other) == ()
    own_analytics = await analyze(alice.store)
    assert (own_analytics.requests.total, own_analytics.chains.count) == (2, 2)


async def test_other_namespaces_have_proxied_requests_of_their_own(
    other: Store, alice: Owner
) -> None:
    """The requests of existing programs belong to their user."""
    (proxied,) = await alice.store.list_proxied()
    with pytest.raises(NotInStore):
        await other.get_proxied(proxied.id)
    assert (await other.sum_proxied()).requests == 0
    assert await other.export_proxied() == []


async def test_other_namespaces_have_evidence_of_their_own(other: Store, alice: Owner) -> None:
    """What is known about a server is stored for each user."""
    assert await other.database.read(lambda tx: select_all_evidence(tx, 10)) == []
    await other.save_evidence("server key", {"owner": "other"})
    assert await alice.store.load_evidence("server key") == {"owner": "alice"}


async def test_other_namespaces_mark_nothing_as_lost(other: Store, alice: Owner) -> None:
    """A response is marked as lost by its user only."""
    (record,) = await alice.store.find_anchors(SCOPE, [alice.digest])
    assert await other.mark_lost(record, "gone") is False
    assert await alice.store.mark_lost(record, "gone") is True


async def test_only_its_user_marks_a_response_as_unknown(other: Store, alice: Owner) -> None:
    """A response in the background that another user names is not changed."""
    conversation = await alice.store.create()
    root = await alice.store.node(conversation, conversation.head)
    record = RequestRecord(provider="p", scope=SCOPE, status="running")
    node = await alice.store.append(conversation, root, (), kind="results", response=record)
    assert await other.mark_unknown(node.id, "Not found.") is False
    assert await alice.store.mark_unknown(node.id, "Not found.") is True
    rows = await alice.store.responses(conversation)
    assert [row.status for row in rows] == ["unknown"]


async def test_titles_are_unique_in_a_namespace(other: Store, alice: Owner) -> None:
    """A title of another user is free."""
    _, is_new = await other.create_titled(alice.row.title)
    assert is_new


async def test_nothing_that_another_namespace_tries_changes_a_conversation(
    other: Store, alice: Owner
) -> None:
    """After all calls for its rows, a conversation is exported as before."""
    before = await alice.store.export(alice.row)
    for row_call in ROW_CALLS.values():
        with pytest.raises(NotInStore):
            await row_call(other, alice.row, alice.nodes[-1])
    for call, _ in EMPTY_METHODS.values():
        await call(other, alice)
    assert await alice.store.export(alice.row) == before


async def read_everything(store: Store) -> list[Any]:
    """Return all statistics, lists and search results of a namespace."""
    selections = [Selection(), Selection(since=0.5, until=86_400.0 * 2.5), Selection(model="gpt")]
    selections += [Selection(conversation="shared")]
    reports: list[Any] = [await analyze(store, each) for each in selections]
    reports += [await analyze_conversations(store, each) for each in selections]
    reports += [await analyze_over_time(store, buckets=3), await list_labels(store)]
    reports += [await list_summaries(store, show=show) for show in LIST_FILTERS]
    reports += [await list_summaries(store, order=order) for order in LIST_ORDERS]
    reports += [await store.search("question"), await store.search("answer*", order="rank")]
    return [*reports, await store.responses(), await store.conversations(archived=None)]


async def test_statistics_are_independent_of_other_namespaces(store: Store, alice: Owner) -> None:
    """Statistics, lists, searches and revisions of a namespace do not change when another one is written."""
    before = await read_everything(alice.store)
    bob = await fill(store, "bob")
    await create_conversation(bob.store, 3, title="Other", tags=["other"])
    forked = await bob.store.fork(bob.row, bob.nodes[1].id)
    for text in ("x", "y"):
        await bob.store.append(forked, bob.nodes[1], [user(text)], kind="asked")
    await bob.store.update(forked, archived=True)
    assert len(await bob.store.create_all([[user("One"), assistant("1")], []])) == 2
    assert await read_everything(alice.store) == before
    await read_everything(bob.store)  # updates the sums
    assert await read_everything(alice.store) == before
    await bob.store.delete(bob.row)
    assert await read_everything(alice.store) == before
    default = await get_revision(store)
    revision = await get_revision(alice.store)
    incident = Incident("forgot", "gone", SCOPE, 1.0)
    await alice.store.note(alice.row, alice.row.head, Telemetry(incidents=(incident,)))
    assert await get_revision(store) == default
    assert await get_revision(alice.store) != revision


async def test_ranked_hits_are_independent_of_other_namespaces(
    store: Store, alice: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only blocks of the same namespace count towards the limit of ranked blocks."""
    monkeypatch.setattr(search, "MAX_RANKED", 2)
    monkeypatch.setattr(search, "PAGE_SIZE", 2)
    await create_conversation(store.use_namespace("bob"), 3, title="Newer")
    hits = await alice.store.search("question", order="rank")
    assert [hit.conversation for hit in hits] == ["shared", "shared"]
    assert await store.search("question", order="rank") == []
    assert await store.search("nothing", order="rank") == []


async def test_id_is_unique_in_a_namespace(store: Store, alice: Owner) -> None:
    """Two users may have conversations with one id, and one user may not."""
    bob = await fill(store, "bob")
    assert bob.row.id == alice.row.id
    with pytest.raises(InvalidSetting, match="there is already a conversation 'shared'"):
        await bob.store.create(id="shared")


async def test_export_of_a_user_is_imported_with_its_id(store: Store, alice: Owner) -> None:
    """The id is free in the namespace of the import."""
    (imported,) = await store.import_(await alice.store.export(alice.row))
    assert imported.id == "shared"
    assert len((await store.load(imported)).blocks) == 4


async def test_deletion_leaves_equal_texts_of_other_users(store: Store, alice: Owner) -> None:
    """Equal texts and responses are stored for each user."""
    bob = await fill(store, "bob")
    forked = await alice.store.fork(alice.row, alice.row.head)
    await alice.store.delete("shared")
    await alice.store.delete(forked)
    assert await alice.store.conversations() == []
    assert len((await bob.store.load(bob.row)).blocks) == 4
    hits = await bob.store.search("question", limit=9)
    assert [hit.conversation for hit in hits] == ["shared"] * 2
    assert await store.verify() == []


async def test_maintenance_covers_all_namespaces(store: Store, alice: Owner) -> None:
    """Only the default namespace can verify and list; its ``gc`` deletes expired data of every namespace."""
    assert await store.namespaces() == ["alice"]
    assert alice.store.namespace == "alice"
    attempts: list[Callable[[], Any]] = [
        lambda: alice.store.use_namespace("bob"),
        alice.store.namespaces,
        alice.store.verify,
    ]
    for attempt in attempts:
        with pytest.raises(InvalidSetting, match="not allowed in the namespace 'alice'"):
            _ = (await result) if inspect.isawaitable(result := attempt()) else result
    store.clock = lambda: 1e12
    await store.gc()
    assert await alice.store.conversations() == []
    assert await store.namespaces() == []


async def test_invalid_names_are_rejected() -> None:
    """An empty, overlong or unprintable namespace name raises `InvalidSetting`."""
    async with open_store("sqlite://:memory:") as store:
        for name in ("", " a", "a\nb", "\0", "x" * 201):
            with pytest.raises(InvalidSetting):
                store.use_namespace(name)
            if name:
                with pytest.raises(InvalidSetting):
                    await open_store("sqlite://:memory:", namespace=name)


async def test_store_is_opened_in_a_namespace(lasting_url: str) -> None:
    """A conversation belongs to the namespace of the store it was created in."""
    async with open_store(lasting_url, namespace="alice") as alice:
        conversation = await Conversation.create("practice", store=alice, title="Mine")
        await conversation.send("My name is Ada.")
        index = StoreIndex(alice)
        assert index.find("scope", ["sha256:1"]) == []
        index.save_evidence("key", {"n": 1})
        index.close()
    async with open_store(lasting_url) as store:
        assert await store.conversations() == []
        assert StoreIndex(store).load_evidence("key") is None
        bound = store.use_namespace("alice")
        assert StoreIndex(bound).load_evidence("key") == {"n": 1}
        (row,) = await bound.conversations()
        assert row.title == "Mine"
        await bound.aclose()  # a view does not close the store
        assert len(await bound.responses()) == 1


async def test_requests_are_kept_per_user(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each namespace retains its own newest requests, however many another one has."""
    monkeypatch.setattr(proxied_requests, "MAX_PROXIED", 3)
    alice, bob = store.use_namespace("alice"), store.use_namespace("bob")
    await alice.add_proxied([PROXIED])
    for number in range(5):
        await bob.add_proxied([replace(PROXIED, response_id=f"resp_{number}")] * 2)
    assert len(await alice.list_proxied()) == 1
    assert [each.response_id for each in await bob.list_proxied()] == ["resp_4", "resp_4", "resp_3"]


async def test_wrong_limits_are_rejected(store: Store) -> None:
    """SQLite would list everything, PostgreSQL would report an error of its own."""
    limit: Any
    for limit in (-1, 2**62, 1.5, "3", None):
        for attempt in (
            store.conversations(limit=limit),
            store.conversations(offset=limit),
            store.list_proxied(limit=limit),
            list_summaries(store, limit=limit),
            analyze_conversations(store, limit=limit),
        ):
            with pytest.raises(
                InvalidSetting, match=r"must be (int, not|an integer of at least 0|less than)"
            ):
                await attempt
    assert await store.conversations(limit=0) == []
