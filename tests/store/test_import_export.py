"""Export and import of conversations without loss."""

import json
import math
from typing import Any, cast

import pytest
from msgspec import structs

from kedge import user
from kedge.errors import InvalidJSON
from kedge.store import (
    ConversationRow,
    Incident,
    Store,
    StoredExchange,
    Telemetry,
    ToolRow,
    open_store,
)
from kedge.turns.frozen_json import FrozenMap
from store.sample_conversations import SCOPE, append_exchange, create_conversation


async def create_full_conversation(store: Store) -> ConversationRow:
    """Create a conversation with settings, telemetry, an edit, a claim, a pending question and line separators."""
    settings: dict[str, Any] = {"tags": ["x"], "retention": 60.0, "ttl": 1e9, "data": {"a": 1}}
    row, nodes = await create_conversation(
        store, 3, title="one\u2028two", mode="chained", **settings
    )
    store.keep_bodies = True
    accounts = Telemetry(
        (Incident("healed", "gone", SCOPE, 5.0),),
        (ToolRow("add", "ok", 0.5, 6.0),),
        (StoredExchange(b"\x00request", b"reply", 200, 7.0),),
    )
    await store.note(row, nodes[2].id, accounts)
    await store.append(row, nodes[-1], [user("a\u2028b\x85c\x0bd\u2029e")], kept=2, kind="edited")
    await store.claim(row, "k", request_hash=b"x", owner="o", lease=1.0)
    await store.append(row, nodes[-1], [user("asked")], kind="asked", key="k")
    state = structs.replace(
        (await store.load(row)).state, mode="conversation", conversation_id="conv_1"
    )
    await store.append(row, nodes[-1], [user("more")], memory=state, data=FrozenMap({"a": [1, {}]}))
    return await store.update(row.id, archived=True)


async def test_imported_conversation_exports_the_same_lines(store: Store) -> None:
    """Tree, anchors, telemetry and keys are the same in another store."""
    row = await create_full_conversation(store)
    lines = await store.export(row)
    header = json.loads(lines.partition("\n")[0])["conversation"]
    assert [claim["key"] for claim in header["claims"]] == ["k"]
    async with open_store("sqlite://:memory:") as other:
        (copy,) = await other.import_(lines)
        assert (copy.id, copy.title, copy.ttl) == (row.id, "one\u2028two", 1e9)
        assert await other.export(copy) == lines
        assert (await other.load(copy)).state == (await store.load(row)).state
        assert len(await other.exchanges(copy)) == 1
        assert await other.verify() == []


async def test_conversation_is_imported_beside_its_origin(store: Store) -> None:
    """A copy in the same store has another id, and is the same otherwise."""
    row = await create_full_conversation(store)
    lines = await store.export(row)
    (imported,) = await store.import_(lines)
    assert imported.id != row.id
    assert (await store.export(imported)).replace(imported.id, row.id) == lines
    assert await store.verify() == []


async def test_fork_is_exported_with_shared_history(store: Store) -> None:
    """The export of a fork does not contain later nodes of the original conversation."""
    row, nodes = await create_conversation(store, 3)
    fork = await store.fork(row, nodes[1].id)
    await append_exchange(store, fork, nodes[1], (await store.load(fork)).turn(), "fork")
    fork = await store.conversation(fork.id)
    lines = await store.export(fork)
    async with open_store("sqlite://:memory:") as other:
        (copy,) = await other.import_(lines)
        assert (await other.load(copy)).blocks == (await store.load(fork)).blocks
        assert len(await other.tree(copy)) == 3
        assert copy.forked_from == row.id


INVALID_EXPORTS = [
    "no json",
    "[]",
    '{"node": 0}',
    '{"format": "other", "version": 1}',
    '{"format": "kedge.conversation", "version": 3, "conversation": {}}',
    '{"format": "kedge.conversation", "version": 3}',
    '{"format": "kedge.conversation", "version": 3, "conversation": null}',
    "[" * 100_000,
]


async def test_invalid_export_imports_nothing(store: Store) -> None:
    """An invalid line raises `InvalidJSON`, and no conversation of the file is imported."""
    row, _ = await create_conversation(store, 1)
    lines = await store.export(row)
    for line in INVALID_EXPORTS:
        with pytest.raises(InvalidJSON):
            await store.import_(line if line.startswith('{"node') else f"{lines}{line}\n")
    assert len(await store.conversations()) == 1


TAMPERED = {
    "a changed block": lambda form: (
        form.get("block", {}).get("parts", [{}])[0].update(text="other")
    ),
    "an object that is no text": lambda form: (
        "node" in form and form.update(memory={"conversation_id": 5, "previous_response_id": "r"})
    ),
    "a last response that is no text": lambda form: (
        "node" in form and form.update(memory={"conversation_id": "c", "previous_response_id": []})
    ),
    "a state that is no object": lambda form: "node" in form and form.update(memory=[]),
    "data that is no object": lambda form: "node" in form and form.update(memory={"data": [1]}),
    "changes of anchors that are no object": lambda form: (
        "node" in form and form.update(memory={"anchors": []})
    ),
    "an added anchor that is no record": lambda form: (
        "node" in form and form.update(memory={"anchors": {"added": [5]}})
    ),
    "a negative block": lambda form: form.get("blocks") and form.update(blocks=[-1, -2]),
    "a negative parent": lambda form: form.get("parent") == 1 and form.update(parent=-1),
    "a node below itself": lambda form: form.get("node") == 1 and form.update(parent=1),
    "a negative kept": lambda form: form.get("node") == 1 and form.update(kept=-1),
    "too many kept": lambda form: form.get("node") == 1 and form.update(kept=9),
    "an unknown kind": lambda form: form.get("node") == 1 and form.update(kind="root"),
    "a negative head": lambda form: form.get("conversation", {}).update(head=-1),
    "no head": lambda form: form.get("conversation", {}).update(head=None),
    "a text as a time": lambda form: form.get("conversation", {}).update(updated_at="soon"),
    "an endless time as a text": lambda form: form.get("conversation", {}).update(created_at="inf"),
    "a time above all bounds": lambda form: form.get("response", {}).update(created_at=2.0**63),
    "a key that is no text": lambda form: form.get("conversation", {}).update(
        claims=[{"key": 5, "request_hash": "", "question": None, "answer": None}]
    ),
    "an origin that is no text": lambda form: form.get("conversation", {}).update(forked_from=7),
    "a number as a title": lambda form: form.get("conversation", {}).update(title=5),
    "an unknown mode": lambda form: form.get("conversation", {}).update(mode="bogus"),
    "a negative retention": lambda form: form.get("conversation", {}).update(retention=-5),
    "an endless time": lambda form: form.get("node") == 1 and form.update(created_at=math.inf),
    "a time of 64 bits": lambda form: form.get("node") == 1 and form.update(created_at=2.0**63),
    "a text as a count": lambda form: form.get("response", {}).update(input_tokens="many"),
    "a huge count": lambda form: form.get("response", {}).update(input_tokens=10**30),
    "a node of its own": lambda form: form.get("response", {}).update(node=1),
}


async def test_tampered_export_imports_nothing(store: Store) -> None:
    """Blocks that do not match a digest and invalid references or values are rejected."""
    row, _ = await create_conversation(store, 2)
    lines = (await store.export(row)).splitlines()
    for name, change in TAMPERED.items():
        forms = [json.loads(line) for line in lines]
        for form in forms:
            cast("Any", change)(form)
        with pytest.raises(InvalidJSON):
            await store.import_([json.dumps(form) for form in forms])
        assert len(await store.conversations()) == 1, name
    assert await store.verify() == []


async def test_export_of_another_version_is_rejected(store: Store) -> None:
    """The error names the version of the format and what to do; nothing is imported."""
    row, _ = await create_conversation(store, 1)
    lines = await store.export(row)
    for version in ("1", "4", "3.0", "true", '"3"'):
        with pytest.raises(InvalidJSON, match="another version of Kedge wrote this export"):
            await store.import_(lines.replace('"version":3', f'"version":{version}'))
    assert len(await store.conversations()) == 1
