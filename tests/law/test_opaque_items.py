"""Items of hosted tools are stored without loss and sent again in a form that a server accepts."""

from typing import Any

from for_each import for_each
from kedge.server.schema.requests import check_create
from kedge.turns import Turn, block_from_item, dumps, item_from_block, loads

COMPLETED = {"status": "completed"}
CALL = {**COMPLETED, "call_id": "call_1"}
MCP = {"name": "n", "arguments": "{}", "server_label": "s"}
ITEMS: list[dict[str, Any]] = [
    {"type": kind, "id": f"{prefix}_1", **members}
    for kind, prefix, members in (
        ("web_search_call", "ws", {**COMPLETED, "action": {"type": "search", "query": "x"}}),
        ("file_search_call", "fs", {**COMPLETED, "queries": ["a"], "results": None}),
        (
            "code_interpreter_call",
            "ci",
            {**COMPLETED, "code": "1", "container_id": "c", "outputs": []},
        ),
        ("image_generation_call", "ig", {**COMPLETED, "result": "eA=="}),
        ("mcp_call", "mcp", MCP),
        ("mcp_approval_request", "mcpr", MCP),
        (
            "computer_call",
            "cu",
            {**CALL, "action": {"type": "screenshot"}, "pending_safety_checks": []},
        ),
        (
            "local_shell_call",
            "lsh",
            {**CALL, "action": {"type": "exec", "command": ["ls"], "env": {}}},
        ),
        ("compaction", "cmp", {"encrypted_content": "x"}),
    )
]


@for_each("item", ITEMS)
def test_server_accepts_its_own_items(item: dict[str, Any]) -> None:
    """The rendered item is valid, has the same content, and contains no local id."""
    block = loads(dumps(Turn([block_from_item(item)]))).blocks[0]
    sent = item_from_block(block)
    check_create({"model": "practice", "input": [sent]})
    retained = {k: v for k, v in item.items() if k not in ("id", "status") and v is not None}
    assert {k: v for k, v in sent.items() if k not in ("id", "status")} == retained
    assert sent.get("id") != block.id
    if item["type"] not in ("mcp_approval_request", "local_shell_call"):
        assert sent.get("id") != item["id"]
