"""Export and import: a conversation as lines of JSON, with its tree, its anchors and its telemetry.

    {"format": "kedge.conversation", "version": 3, "conversation": {…}}
    {"block": {…}}                                  one line per block, numbered 0, 1, …
    {"node": 0, "parent": null, "blocks": [0, 1], "response": {…}, …}   one line per node

Nodes and blocks are numbered from 0, so an imported conversation exports the same lines again. A file may
contain several conversations. An import is checked like a stored tree: digests must match their blocks,
and references must point backwards.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast, get_args

import msgspec
from msgspec.structs import replace

from kedge._internal.arguments import describe_value
from kedge._internal.json_text import decode, reject_constant
from kedge._internal.json_text import encode_text as encode
from kedge.errors import InvalidJSON, InvalidSetting
from kedge.events.request_record import RequestRecord
from kedge.planning.anchor_changes import AnchorChanges
from kedge.store.append import insert_node
from kedge.store.changes import create_conversation
from kedge.store.conversations import select_conversation
from kedge.store.database.transactions import Tx
from kedge.store.nodes import find_used_nodes, get_node, select_tree
from kedge.store.records import (
    ConversationRow,
    Incident,
    Node,
    NodeKind,
    StoredExchange,
    ToolRow,
    new_row,
    validate_name,
    validate_text,
)
from kedge.store.responses import RESPONSE_COLUMNS, TABLES, insert_record, select_responses
from kedge.store.stored_blocks import StoredBlock, to_stored_block
from kedge.store.verify import check_tree
from kedge.turns import load_block, new_id
from kedge.turns.frozen_json import freeze_map, thaw

FORMAT = "kedge.conversation"
VERSION = 3
Json = dict[str, Any]

_LOCAL_FIELDS = ("tree", "number", "delete_at")
"""The members of a conversation that mean nothing in another store."""
_ADDED_KINDS = frozenset(get_args(NodeKind)) - {"root"}
_RESPONSE_DEFAULTS = {each.name: each.default for each in msgspec.structs.fields(RequestRecord)}


class _Claim(msgspec.Struct):
    key: str
    request_hash: bytes
    question: int | None
    answer: int | None


class _NodeLine(msgspec.Struct):
    node: int
    kind: str
    kept: int
    blocks: list[int]
    created_at: float
    parent: int | None = None
    memory: Json | None = None
    response: RequestRecord | None = None
    incidents: tuple[Incident, ...] = ()
    tool_runs: tuple[ToolRow, ...] = ()
    exchanges: tuple[StoredExchange, ...] = ()


class ExportedConversation(NamedTuple):
    """The lines of one conversation: its header, its encoded blocks and its nodes."""

    header: Json
    blocks: list[StoredBlock]
    nodes: list[_NodeLine]


def export_conversation(tx: Tx, conversation: ConversationRow) -> str:
    """Return a conversation as lines of JSON: its tree with blocks, anchors and telemetry.

    These are the nodes that it added and their ancestors.
    """
    tx.allow_long_statements()
    row = select_conversation(tx, conversation.id)
    tree = select_tree(tx, row.tree)
    added = [node.id for node in tree if node.conversation == row.number]
    used = find_used_nodes(tree, [row.head, *added])
    nodes = [node for node in tree if node.id in used]
    numbers = {node.id: number for number, node in enumerate(nodes)}
    links = {node.id: _select_blocks(tx, node) for node in nodes}
    bodies = {block: body for blocks in links.values() for block, body in blocks}
    positions = {block: position for position, block in enumerate(bodies)}
    responses = {each.node: each for each in select_responses(tx, "WHERE n.tree = ?", (row.tree,))}
    telemetry = {name: _export_telemetry(tx, name, row, numbers) for name in TABLES}

    header = {
        "format": FORMAT,
        "version": VERSION,
        "conversation": _export_conversation(tx, row, numbers),
    }
    lines = [encode(header)]
    lines += [f'{{"block":{body}}}' for body in bodies.values()]
    for node in nodes:
        linked = [positions[block] for block, _ in links[node.id]]
        form = _encode_node(node, numbers, linked, responses.get(node.id))
        for name, records in telemetry.items():
            if node.id in records:
                form[name] = records[node.id]
        lines.append(encode(form))
    return "".join(f"{line}\n" for line in lines)


def _export_conversation(tx: Tx, row: ConversationRow, numbers: dict[int, int]) -> Json:
    """Return the members of a conversation, with the numbers of nodes in the export."""
    members = {name: getattr(row, name) for name in ConversationRow.__struct_fields__}
    for name in _LOCAL_FIELDS:
        del members[name]
    if row.ttl is None:
        del members["ttl"]
    return members | {
        "head": numbers[row.head],
        "data": thaw(row.data),
        "forked_at": numbers.get(row.forked_at),
        "claims": _export_claims(tx, row, numbers),
    }


def _select_blocks(tx: Tx, node: Node) -> list[tuple[int, str]]:
    rows = tx.rows(
        "SELECT b.id, b.body FROM links l JOIN blocks b ON b.id = l.block "
        "WHERE l.branch = ? AND l.place >= ? AND l.place < ? ORDER BY l.place",
        (node.branch, node.kept, node.length),
    )
    return cast("list[tuple[int, str]]", rows)


def _encode_node(
    node: Node, numbers: dict[int, int], blocks: list[int], response: RequestRecord | None
) -> Json:
    form: Json = {
        "node": numbers[node.id],
        "parent": numbers.get(node.parent),
        "kind": node.kind,
        "kept": node.kept,
        "blocks": blocks,
        "created_at": node.created_at,
    }
    if node.memory:
        form["memory"] = decode(node.memory)
    if response:
        members: Json = {}
        for name in RESPONSE_COLUMNS:
            value = getattr(response, name)
            if value != _RESPONSE_DEFAULTS[name]:
                members[name] = value
        form["response"] = msgspec.to_builtins(members)
    return form


def _export_telemetry(
    tx: Tx, table: str, row: ConversationRow, numbers: dict[int, int]
) -> dict[int, list[Json]]:
    """Return the records of a table, by node."""
    members = TABLES[table]
    columns = {name: f"t.{name}" for name in members}
    source = f"{table} t"
    if "scope" in members:
        columns["scope"] = "s.name"
        source += " JOIN scopes s ON s.number = t.scope"
    rows = tx.rows(
        f"SELECT t.node, {', '.join(columns.values())} FROM {source} "
        "WHERE t.conversation = ? ORDER BY t.id",
        (row.number,),
    )
    records: dict[int, list[Json]] = {}
    for node, *values in rows:
        if node in numbers:
            form = dict(zip(members, values, strict=True))
            records.setdefault(node, []).append(msgspec.to_builtins(form))
    return records


def _export_claims(tx: Tx, row: ConversationRow, numbers: dict[int, int]) -> list[Json]:
    query = (
        "SELECT key, request_hash, question, answer FROM claims WHERE conversation = ? ORDER BY key"
    )
    return [
        msgspec.to_builtins(_Claim(key, request_hash, numbers.get(question), numbers.get(answer)))
        for key, request_hash, question, answer in tx.rows(query, (row.number,))
    ]


NOT_AN_EXPORT = "not a JSON object; import a file that 'kedge export' wrote"


def parse_lines(lines: Iterable[str]) -> list[ExportedConversation]:
    """Return the conversations of exported lines.

    Raises:
        InvalidJSON: The lines are not a valid export.
    """
    conversations: list[ExportedConversation] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        form = _parse_line(line, number)
        if "format" in form:
            conversations.append(ExportedConversation(_check_header(form, number), [], []))
        elif not conversations:
            raise InvalidJSON(f"line {number}", f"expected a line with the format {FORMAT!r} first")
        elif "block" in form:
            block = load_block(form["block"], f"line {number}")
            conversations[-1].blocks.append(to_stored_block(block))
        else:
            with _name_conversation(len(conversations) - 1):
                conversations[-1].nodes.append(msgspec.convert(_check_response(form), _NodeLine))
    return conversations


def list_scopes(exported: Iterable[ExportedConversation]) -> list[str]:
    """Return the scopes of responses and incidents."""
    scopes: set[str] = set()
    for conversation in exported:
        for node in conversation.nodes:
            scopes.update(incident.scope for incident in node.incidents)
            if node.response:
                scopes.add(node.response.scope)
    return sorted(scopes)


def import_lines(tx: Tx, exported: Sequence[ExportedConversation]) -> list[ConversationRow]:
    """Create conversations and return their rows; an id in use is replaced."""
    tx.allow_long_statements()
    ids: dict[int, str] = {}
    # In the order of their ids, so that simultaneous imports wait for each other without a deadlock.
    for number, each in sorted(enumerate(exported), key=lambda each: str(each[1].header.get("id"))):
        with _name_conversation(number):
            ids[number] = _import_conversation(tx, *each)
    return [select_conversation(tx, ids[number]) for number in sorted(ids)]


@contextmanager
def _name_conversation(number: int) -> Generator[None]:
    """Name the conversation in the errors of this block."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = type(error).__name__
        if isinstance(error, ValueError):
            reason = str(error)
        problem = f"conversation {number} is not valid ({reason}); nothing was imported"
        raise InvalidJSON("$", problem) from None


def _parse_line(line: str, number: int) -> Json:
    try:
        form = decode(line, parse_constant=reject_constant)
    except (ValueError, RecursionError):
        form = None
    if not isinstance(form, dict):
        raise InvalidJSON(f"line {number}", NOT_AN_EXPORT)
    return cast("Json", form)


def _check_header(form: Json, number: int) -> Json:
    if form["format"] != FORMAT:
        raise InvalidJSON(f"line {number}", f"expected the format {FORMAT!r}")
    version = form.get("version")
    if type(version) is not int or version != VERSION:
        raise InvalidJSON(
            f"line {number}",
            f"another version of Kedge wrote this export (format {describe_value(version)}, this version reads "
            f"{VERSION}); import it with that version",
        )
    if not isinstance(form.get("conversation"), dict):
        raise InvalidJSON(f"line {number}", "it has no object 'conversation'; export it again")
    return cast("Json", form["conversation"])


def _import_conversation(
    tx: Tx, header: Json, blocks: list[StoredBlock], nodes: list[_NodeLine]
) -> str:
    name = validate_name(header["id"], "id")
    if not name or not nodes or nodes[0].kind != "root" or nodes[0].blocks:
        raise ValueError("it needs an id, and an empty root as its first node")
    new = new_row(
        header["title"],
        tags=header["tags"],
        mode=header["mode"],
        retention=header["retention"],
        ttl=header.get("ttl"),
        data=header["data"] or {},
        id=name,
    )
    created_at = _check_time(header["created_at"])
    root_created_at = _check_time(nodes[0].created_at)
    try:
        row = create_conversation(tx, new, created_at, root_created_at)
    except InvalidSetting:  # the id is in use, perhaps only since another import has committed
        new = replace(new, id=new_id("conv"))
        row = create_conversation(tx, new, created_at, root_created_at)
    created: list[Node] = [get_node(tx, row)]
    for line in nodes[1:]:
        created.append(_import_node(tx, line, row, created, blocks))
    for line, node in zip(nodes, created, strict=True):
        for table in TABLES:
            for record in getattr(line, table):
                _check_time(record.created_at)
                insert_record(tx, table, row.number, node.id, record)
    _finish_import(tx, header, row, created)
    for damage in check_tree(tx, row.tree):
        raise ValueError(f"{damage}; it was changed after it was exported")
    return row.id


def _import_node(
    tx: Tx, line: _NodeLine, row: ConversationRow, created: list[Node], blocks: list[StoredBlock]
) -> Node:
    """Add the next node; it may refer only to nodes and blocks that came before it."""
    if line.node != len(created) or line.kind not in _ADDED_KINDS:
        raise ValueError(f"node {line.node!r} is of an unknown kind or out of order")
    parent = created[_check_index(line.parent, len(created))]
    memory = None
    if line.memory is not None:
        memory = encode(_check_memory(line.memory))
    node, _ = insert_node(
        tx,
        parent,
        [blocks[_check_index(index, len(blocks))] for index in line.blocks],
        conversation=row,
        kind=cast("NodeKind", line.kind),
        now=_check_time(line.created_at),
        kept=_check_index(line.kept, parent.length + 1),
        memory=memory,
        response=line.response,
    )
    return node


def _check_memory(form: Json) -> Json:
    """Check the state of a node: its ids are texts, its data is an object, and its anchors are changes of records."""
    memory = thaw(freeze_map(form, "data"))
    freeze_map(memory.get("data", {}), "data")
    msgspec.convert(memory.get("anchors", {}), AnchorChanges)
    for name in ("conversation_id", "previous_response_id"):
        if type(memory.get(name, "")) is not str:
            raise ValueError(f"{name} is not a text")
    return memory


def _check_index(index: object, count: int) -> int:
    """Check a reference to one of the first ``count`` nodes, blocks or positions."""
    if type(index) is not int or not 0 <= index < count:
        raise ValueError(f"{index!r} refers to nothing before it")
    return index


def _check_time(value: object) -> float:
    """Check a time in seconds since 1970, which every database can store."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1 << 63:
        raise ValueError(f"{value!r} is not a time")
    return float(value)


def _check_response(form: Json) -> Json:
    """Check the names and numbers in the response of a node; return the line of the node."""
    response = form.get("response", {})
    if unknown := response.keys() - set(RESPONSE_COLUMNS):
        raise ValueError(f"a response has no {min(unknown)!r}")
    if any(isinstance(value, int | float) and abs(value) >= 1 << 63 for value in response.values()):
        raise ValueError("a response has a number above 64 bits")
    return form


def _finish_import(tx: Tx, header: Json, row: ConversationRow, nodes: list[Node]) -> None:
    for claim in msgspec.convert(header["claims"], list[_Claim]):
        tx.run(
            "INSERT INTO claims (conversation, key, request_hash, owner, lease_until, question, answer) "
            "VALUES (?, ?, ?, '', 0, ?, ?)",
            (
                row.number,
                validate_name(claim.key, "key"),
                claim.request_hash,
                _resolve_node(nodes, claim.question),
                _resolve_node(nodes, claim.answer),
            ),
        )
    origin = validate_text(header.get("forked_from") or "", "id")
    tx.run(
        "UPDATE conversations SET head = ?, archived = ?, forked_from = ?, forked_at = ?, updated_at = ? "
        "WHERE number = ?",
        (
            nodes[_check_index(header["head"], len(nodes))].id,
            int(bool(header["archived"])),
            origin or None,
            _resolve_node(nodes, header.get("forked_at")),
            _check_time(header["updated_at"]),
            row.number,
        ),
    )


def _resolve_node(nodes: list[Node], number: Any) -> int | None:
    if number is None:
        return None
    return nodes[_check_index(number, len(nodes))].id
