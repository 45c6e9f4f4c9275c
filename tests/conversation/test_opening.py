"""The constructor of a conversation: what it checks, when it opens and creates, and what it closes."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest

from conversation.conftest import Connect, add
from for_each import for_each
from forked import run_forked_async
from kedge import Chat, Conversation, assistant, connect, errors, open_store, run_sync, system, user
from kedge.conversation.sync import SyncConversation
from kedge.middleware import block, guard
from kedge.store import Store
from kedge.testing import TestServer


@for_each(
    ("settings", "error", "message"),
    [
        ({"model": "opnai:gpt-5.1"}, errors.CannotConnect, "did you mean 'openai:gpt-5.1'"),
        ({"model": 5}, errors.InvalidSetting, "model string such as 'openai:gpt-5.1'"),
        ({"tols": [add]}, errors.UnknownSetting, "did you mean 'tools'"),
        ({"instructions": "x"}, errors.UnknownSetting, "system="),
        ({"id": "ada"}, errors.InvalidSetting, "id= needs store="),
        ({"ttl": 60.0}, errors.InvalidSetting, "ttl= needs store="),
        ({"store": "x.db", "id": ""}, errors.InvalidSetting, "the id is empty"),
        ({"store": "x.db", "id": 5}, errors.InvalidSetting, "id must be text"),
        ({"store": "x.db", "title": "\0"}, errors.InvalidSetting, "NUL"),
        ({"tags": "one"}, errors.InvalidSetting, "list of texts"),
        ({"store": "x.db", "id": "x" * 401}, errors.InvalidSetting, "id must have at most 400"),
        ({"tags": ["x" * 401]}, errors.InvalidSetting, "tag must have at most 400"),
        ({"blocks": [3]}, errors.InvalidTurn, "int"),
        ({"tools": [3]}, errors.KedgeError, "int"),
        ({"mode": "statless"}, errors.InvalidSetting, "statless"),
        ({"retention": -1}, errors.InvalidSetting, "retention"),
        ({"lease": 0}, errors.InvalidSetting, "lease"),
        ({"concurrent": "wait"}, errors.InvalidSetting, "conflict, queue"),
        ({"store": "postgres"}, errors.CannotOpenStore, "postgresql://user@host"),
        ({"store": "memory"}, errors.CannotOpenStore, "sqlite://:memory:"),
        ({"store": ""}, errors.CannotOpenStore, "is empty"),
        ({"store": False}, errors.InvalidSetting, "without store= a conversation is in memory"),
        ({"store": "nowhere/x.db"}, errors.CannotOpenStore, "its folder does not exist"),
        ({"store": "mysql://x"}, errors.CannotOpenStore, "unknown store address"),
        ({"store": "."}, errors.CannotOpenStore, "is a folder"),
    ],
)
def test_constructor_checks_all_that_needs_no_store(
    settings: dict[str, Any], error: type[Exception], message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """A wrong argument raises at once, with what to write, and creates no file."""
    monkeypatch.chdir(tmp_path)
    settings = {"model": "practice", **settings}
    with pytest.raises(error, match=message):
        Conversation(**settings)
    assert list(tmp_path.iterdir()) == []


async def test_store_as_the_model_names_store(store: Store) -> None:
    """Arguments of the older order raise an error that names ``store=``."""
    model: Any = store
    with pytest.raises(errors.InvalidSetting, match=r"store=…: Conversation\("):
        Conversation(model)
    with pytest.raises(errors.InvalidSetting, match="store="):
        Conversation.create(model)
    with pytest.raises(TypeError):
        Conversation(store, "practice")  # pyright: ignore[reportCallIssue, reportArgumentType]


FIRST_BLOCKS = (system("Be brief."), user("Hello"))


async def test_new_conversation_has_its_settings_and_first_blocks(store: Store) -> None:
    """A conversation that is not stored yet has its title, tags and blocks, and is planned with them."""
    conversation = Conversation(
        "practice", store=store, id="a", title="T", tags=["x"], blocks=FIRST_BLOCKS
    )
    assert conversation.id == "a"
    await conversation
    assert conversation.is_new
    assert (conversation.title, conversation.tags, conversation.head) == ("T", ("x",), 0)
    assert conversation.turn.blocks == FIRST_BLOCKS
    assert conversation.plan("Hi").full_blocks == 2


async def test_reading_never_creates(store: Store) -> None:
    """What reads, plans or fails stores nothing."""
    conversation = await Conversation("practice", store=store, id="a", blocks=FIRST_BLOCKS)
    for read in (
        conversation.tree,
        conversation.path,
        conversation.pending,
        conversation.responses,
    ):
        assert list(await read()) == []
    await (await conversation.refresh()).probe_and_plan("Hi")
    with pytest.raises(errors.NotInStore, match="send a message first"):
        await conversation.undo()
    assert await store.conversations() == []


async def test_first_write_stores_the_first_blocks(store: Store) -> None:
    """The conversation is stored with its settings, and its first blocks are a node."""
    conversation = Conversation(
        "practice", store=store, id="a", title="T", tags=["x"], blocks=FIRST_BLOCKS
    )
    await conversation.append(assistant("Hello!"))
    (row,) = await store.conversations()
    assert (row.id, row.title, row.tags) == ("a", "T", ("x",))
    assert [node.kind for node in await store.tree(row)] == ["root", "added", "added"]
    assert conversation.is_new


async def test_settings_of_a_new_conversation_have_no_effect_on_a_stored_one(store: Store) -> None:
    """A conversation that exists keeps its title and its blocks."""
    await Conversation("practice", store=store, id="a", title="T").append("Hello")
    again = await Conversation("practice", store=store, id="a", title="Other", blocks="Other")
    assert (again.is_new, again.title, again.turn.blocks) == (False, "T", (user("Hello"),))


async def test_every_write_creates(store: Store) -> None:
    """The first write of any kind opens and creates the conversation."""
    for verb in ("send", "append", "rename", "tag", "fork"):
        conversation = Conversation("practice", store=store, id=verb, blocks="Hello")
        await getattr(conversation, verb)(*["Hi"] * (verb != "fork"))
        assert (await store.conversation(verb)).id == verb


async def test_create_must_be_new_and_open_must_exist(store: Store) -> None:
    """`create` and `open` are lazy, and raise when they are opened; a rejected first block creates nothing.

    A conversation that is about to be deleted is not continued.
    """
    missing = Conversation.open("practice", store=store, id="a")
    with pytest.raises(errors.NotInStore):
        await missing.send("Hello")
    created = await Conversation.create("practice", store=store, id="a")
    assert (await store.conversation("a")).id == created.id
    with pytest.raises(errors.InvalidSetting, match="already a conversation 'a'"):
        await Conversation.create("practice", store=store, id="a")
    await store.schedule_delete("a", 1e12)
    with pytest.raises(errors.NotInStore, match="'a' is about to be deleted"):
        await missing.send("Hello")
    await store.schedule_delete("a", None)
    assert not (await missing).is_new  # a failure is not remembered
    rule = guard(block("secret"))
    with pytest.raises(errors.KedgeError):
        await Conversation.create("practice", store=store, blocks="a secret", middleware=[rule])
    assert len(await store.conversations()) == 1


async def test_properties_before_the_first_use(store: Store) -> None:
    """Properties of a conversation that is not open say ``await conversation``; those of ``.sync`` open it."""
    for name in ("turn", "title", "tags", "head", "row", "is_new"):
        conversation = Conversation("practice", store=store, id="a")
        with pytest.raises(errors.KedgeError, match="`await conversation`"):
            getattr(conversation, name)
        with pytest.raises(errors.KedgeError, match="`await conversation`"):
            conversation.plan("Hi")
        assert "not open" in repr(conversation)
        await anyio.to_thread.run_sync(getattr, conversation.sync, name)
        getattr(conversation, name)


def test_with_needs_sync(tmp_path: Path) -> None:
    """`with` without ``.sync`` names both forms, for conversations, engines and stores."""
    for resource in (Conversation("practice"), connect("practice"), open_store(tmp_path / "x.db")):
        with pytest.raises(TypeError, match=r"async with .*with .*\.sync"), resource:  # pyright: ignore[reportGeneralTypeIssues, reportAttributeAccessIssue]
            pass


def test_three_lines(tmp_path: Path) -> None:
    """A file and an id continue a conversation in the next run, in sync code."""
    for question, answer in (("My name is Ada.", "Ada"), ("What is my name?", "Your name is Ada.")):
        path = tmp_path / "agent.db"
        with Conversation("practice", store=path, id="ada", tools=[add]).sync as chat:
            assert isinstance(chat, SyncConversation)
            assert answer in chat.send(question).text
            other = chat.fork()
            assert isinstance(other, SyncConversation)
            other.send("Only there.")
            assert [block.text for block in chat.diff(other).added][:1] == ["Only there."]
            assert chat.merge_summary_of(other).kind == "merged"
            with chat.stream("What is 2+3?") as stream:
                assert "".join(stream.text_deltas()) == stream.reply.text
            chat.undo()


async def test_file_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is that of the working folder when the conversation was made."""
    monkeypatch.chdir(tmp_path)
    conversation = Conversation("practice", store="a.db", id="a")
    plain = open_store("sqlite:///b.db")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    async with conversation, plain:
        await conversation.append("Hello")
    assert {*os.listdir(tmp_path)} >= {"a.db", "b.db", "other"}  # noqa: PTH208


async def test_store_of_an_address_is_shared_and_counted(tmp_path: Path) -> None:
    """Conversations with one address have one store, which the last one closes; a fork is one of them."""
    first = Conversation("practice", store=tmp_path / "x.db", id="a")
    second = Conversation("practice", store=str(tmp_path / "x.db"), id="b")
    assert first.store is second.store
    fork = await first.fork()
    await first.aclose()
    await second.aclose()
    await fork.send("Hello")
    await fork.aclose()
    with pytest.raises(errors.StoreError, match="closed"):
        await fork.store.conversations()
    async with Conversation("practice", store=tmp_path / "x.db", id="a") as again:
        assert (again.store is not fork.store, again.is_new) == (True, False)
    assert Conversation("practice").store is not Conversation("practice").store


async def test_closing_leaves_what_was_given(store: Store, kedge_server: TestServer) -> None:
    """A conversation and a Chat close neither a given engine, whose streams continue, nor a given store."""
    async with connect(f"responses:{kedge_server.base_url}#practice") as engine:
        other = Conversation(engine, store=store)
        async with other.stream("Count to 5") as stream:
            await anext(stream)
            async with Conversation(engine, store=store) as conversation, Chat(engine) as chat:
                await conversation.send("Hello")
                await chat.chat_with_state(None, "Hello")
            assert (await stream.finish()).text == "1 2 3 4 5"
    assert len(await store.conversations()) == 2


async def test_closing_is_final(store: Store) -> None:
    """A closed conversation says that it is closed; its Turn can still be read."""
    conversation = Conversation("practice", store=store)
    await conversation.send("Hello")
    await conversation.aclose()
    await conversation.aclose()
    with pytest.raises(
        errors.KedgeError, match="this conversation is closed; make another Conversation"
    ):
        await conversation.send("Hello")
    assert len(conversation.turn) == 2


async def test_opened_once_for_all_tasks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten tasks open a conversation once, one that is cancelled does not cancel it; a failed opening is repeated."""
    await Conversation.create("practice", store=store, id="a")
    started, proceed = anyio.Event(), anyio.Event()
    find, outcomes = (
        store.conversation,
        list[Exception | None]([None, errors.StoreBusy("busy"), None]),
    )

    async def find_slowly(name: Any) -> Any:
        started.set()
        await proceed.wait()
        if error := outcomes.pop(0):
            raise error
        return await find(name)

    monkeypatch.setattr(store, "conversation", find_slowly)
    conversation = Conversation("practice", store=store, id="a")
    tasks = [asyncio.ensure_future(conversation) for _ in range(10)]
    await started.wait()
    tasks[0].cancel()
    tasks[5].cancel()
    proceed.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert (len(outcomes), results.count(conversation)) == (2, 8)
    again = Conversation("practice", store=store, id="a")
    with pytest.raises(errors.StoreBusy):
        await again
    await again.send("Hello")
    assert outcomes == []


def test_opened_once_for_all_threads_and_loops(sqlite_url: str) -> None:
    """Threads with their own loops, and repeated ``asyncio.run``, use one conversation."""
    conversation = Conversation("practice", store=sqlite_url, id="a", concurrent="queue")

    async def send(number: int) -> str:
        return (await conversation.send(f"What is {number}+1?")).text

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda number: asyncio.run(send(number)), range(4)))
    assert answers == [f"{number}+1 = {number + 1}." for number in range(4)]
    assert asyncio.run(send(5)) == "5+1 = 6."
    assert len(conversation.sync.turn) == 10
    conversation.sync.close()


async def test_two_objects_may_create_one_conversation(store: Store) -> None:
    """Both begin with an empty conversation: the first write creates it, and the other one continues it."""
    first, second = (Conversation("practice", store=store, id="a", blocks="Hi") for _ in range(2))
    await first
    await second
    await first.append("one")
    await second.append("two")
    assert [block.text for block in second.turn] == ["Hi", "one", "two"]
    assert (first.is_new, second.is_new) == (True, False)


OPENER = """
import sys
from kedge import Conversation
with Conversation("practice", store=sys.argv[1], id="one", concurrent="queue").sync as chat:
    print(chat.send(f"What is {sys.argv[2]}+1?").text)
"""


async def test_processes_share_one_new_id(store: Store, store_url: str) -> None:
    """Processes that start with one new id queue their turns in one conversation."""
    done: list[str] = []

    async def run(number: int) -> None:
        process = await run_forked_async("-c", OPENER, store_url, str(number), check=True)
        done.append(process.stdout.strip())

    async with anyio.create_task_group() as tasks:
        for number in range(2):
            tasks.start_soon(run, number)
    assert sorted(done) == ["0+1 = 1.", "1+1 = 2."]
    conversation = await Conversation.open("practice", store=store, id="one")
    assert len(conversation.turn) == 4


async def test_mode_and_retention_apply_to_an_existing_conversation(
    store: Store, connected: Connect, kedge_server: TestServer
) -> None:
    """``mode="stateless"`` stores nothing at the provider, also in a conversation that was made without it."""
    first = await Conversation.create(connected(), store=store, id="a")
    await first.send("My name is Ada.")
    again = Conversation(connected(), store=store, id="a", mode="stateless", retention=30.0)
    assert (await again.send("What is my name?")).text == "Your name is Ada."
    assert kedge_server.requests[-1].body["store"] is False
    assert again.row.retention == 30.0
    fork = await again.fork()
    await fork.send("Hello")
    assert kedge_server.requests[-1].body["store"] is False
    await again.merge_summary_of(first)
    assert kedge_server.requests[-1].body["store"] is False
    row = await store.conversation("a")
    assert (row.mode, row.retention) == (None, None)
    assert (await first.refresh()).plan("Hi").mode == "chained"


async def test_first_use_of_a_store(tmp_path: Path) -> None:
    """A store is opened by its first use, ``await``, ``async with`` or ``with store.sync``."""
    assert await open_store(tmp_path / "a.db").conversations() == []
    store = open_store(tmp_path / "b.db")
    assert not (tmp_path / "b.db").exists()
    assert await store is store
    assert (tmp_path / "b.db").exists()
    await store.aclose()
    with pytest.raises(errors.StoreError, match="the store is closed"):
        await store.conversations()
    never_used = open_store(tmp_path / "c.db")
    await never_used.aclose()
    with pytest.raises(errors.StoreError, match="the store is closed"):
        await never_used


def test_sync_store(tmp_path: Path) -> None:
    """`with store.sync` opens and closes a store in sync code."""
    with open_store(tmp_path / "a.db").sync as store:
        row = store.create("A title")
        assert [each.id for each in store.conversations()] == [row.id]
    with pytest.raises(errors.StoreError, match="closed"):
        store.conversations()
    (tmp_path / "bad.db").write_text("not a database, but long enough to be looked at" * 50)
    with pytest.raises(errors.CannotOpenStore), open_store(tmp_path / "bad.db").sync:
        pass
    with pytest.raises(errors.CannotOpenStore):
        run_sync(open_store(tmp_path / "bad.db"))


def test_sync_has_every_method_and_property() -> None:
    """Whatever a conversation has, its sync form has too; opening and closing are ``with`` and ``close``."""
    static = {"create", "open", "list", "search", "import_"}
    names = {name for name in dir(Conversation) if not name.startswith("_")} - static
    assert names - {*dir(SyncConversation)} == {"aclose", "sync", "price", "lease"} & names
