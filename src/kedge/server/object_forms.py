"""Ids and forms of items and responses: input is normalized to its full form, with id and status.

Ids contain the number of a database row, so that no index of ids is needed. Everything that a request adds shares one
key: the number of its node in the database, then random digits. The response is ``resp_<key>`` and its items are
``msg_<key><n>``, ``fc_<key><n>`` and so on. The number is encrypted, because all users share the numbers: a user cannot
count the responses of other users. A key in an id is not trusted: it is valid if the node of that number has exactly
this key.

Clients send items in short forms (a bare string, a message without a type, content as a string).
They are normalized once, before they are stored, so that the model, the list of input items and the
next turn all read the same form.

The ``response`` object of the API has two parts. The request fields echo the settings of the request, with defaults for
omitted ones; nothing is inherited from the previous response. They never change, so they are encoded once. The result
fields (status, usage, error…) describe how the response ended. The output items are encoded separately.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from itertools import count, repeat
from typing import TYPE_CHECKING, Any

from kedge.server.errors import INTERNAL_ERROR, ApiError
from kedge.server.prompt_cache import MIN_CACHED_TOKENS

if TYPE_CHECKING:
    from kedge.server.models import ModelUsage

NODE_DIGITS = 10
KEY_DIGITS = 32

ID_PREFIXES: Mapping[str, str] = {
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apc",
    "code_interpreter_call": "ci",
    "compaction": "cmp",
    "computer_call": "cu",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctc",
    "file_search_call": "fs",
    "function_call": "fc",
    "function_call_output": "fc",
    "image_generation_call": "ig",
    "local_shell_call": "lsh",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpr",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcpl",
    "message": "msg",
    "reasoning": "rs",
    "shell_call": "sh",
    "shell_call_output": "sh",
    "web_search_call": "ws",
}
"""The prefix of an item id by the type of the item; other types have ``item``."""

RESPONSE_ID = re.compile(rf"resp_([0-9a-f]{{{KEY_DIGITS}}})")
ITEM_ID = re.compile(rf"[a-z]+_([0-9a-f]{{{KEY_DIGITS}}})[0-9a-f]{{4,}}")


def new_unstored_key() -> str:
    """Return a key without a node, for what is not stored."""
    return os.urandom(KEY_DIGITS // 2).hex()


class NodeKeys:
    """Keys that contain the encrypted number of a node.

    Args:
        secret: The secret of the database that the number is encrypted with.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def new(self, node: int) -> str:
        """Return the key of a new node."""
        random = os.urandom((KEY_DIGITS - NODE_DIGITS) // 2).hex()
        return f"{node ^ self._compute_mask(random):0{NODE_DIGITS}x}{random}"

    def parse_node(self, key: str) -> int:
        """Return the number of the node in a key."""
        return int(key[:NODE_DIGITS], 16) ^ self._compute_mask(key[NODE_DIGITS:])

    def parse_id(self, form: re.Pattern[str], id: str) -> tuple[int, str] | None:
        """Return the number and the key in an id, or None if it has another form."""
        match = form.fullmatch(id)
        if match is None:
            return None
        key = match[1]
        return self.parse_node(key), key

    def _compute_mask(self, random: str) -> int:
        size = NODE_DIGITS // 2
        digest = hashlib.blake2b(
            random.encode(), key=self._secret, digest_size=size, person=b"node number"
        )
        return int.from_bytes(digest.digest())


def make_item_id(type: str, key: str, number: int) -> str:
    """Return the id of the ``number``-th item of the request with this key."""
    return f"{ID_PREFIXES.get(type, 'item')}_{key}{number:04x}"


def make_call_id(key: str, number: int, prefix: str = "call") -> str:
    """Return the call id of the ``number``-th item of the request with this key."""
    return f"{prefix}_{key}{number:04x}"


Item = Mapping[str, Any]
"""One item of a conversation in the format of the API: a message, a call, an output, reasoning…"""

TYPES_WITHOUT_STATUS = frozenset(
    {"reasoning", "compaction", "additional_tools", "configuration_update"}
)
"""Types of items that have no ``status``."""


def normalize_items(items: Sequence[Item], key: str) -> list[Item]:
    """Return the items in full form; ids of items without one are derived from ``key``."""
    return list(map(_normalize_item, items, repeat(key), count()))


def _normalize_item(item: Item, key: str, number: int) -> Item:
    type: str = item.get("type") or "message"
    full: dict[str, Any] = {"id": item.get("id") or make_item_id(type, key, number), "type": type}
    full |= {name: value for name, value in item.items() if value is not None}
    if type == "message":
        content = full.get("content", "")
        if not isinstance(content, str):
            full["content"] = [_normalize_part(part) for part in content]
        elif full["role"] == "assistant":
            full["content"] = [build_output_text(content)]
        else:
            full["content"] = [{"type": "input_text", "text": content}]
    if type not in TYPES_WITHOUT_STATUS:
        full.setdefault("status", "completed")
    return full


def _normalize_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part["type"] != "output_text":
        return part
    return {"annotations": [], "logprobs": [], **part}


def build_output_text(text: str) -> dict[str, Any]:
    """Build a text part of a model's message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def list_input(input: str | Sequence[Item]) -> Sequence[Item]:
    """Return the items of a request's input; a text is one message of the user."""
    if isinstance(input, str):
        return [{"role": "user", "content": input}]
    return input


Body = Mapping[str, Any]

DEFAULTS: Mapping[str, Any] = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "temperature": 1.0,
    "tool_choice": "auto",
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
}
"""Parameters and their values if they are omitted or null."""

SERVICE_TIERS = {"auto": "default", "fast": "priority"}
"""Tiers that are echoed under another name."""

IN_PROGRESS_FIELDS: Mapping[str, Any] = {
    "status": "in_progress",
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "usage": None,
}
"""The result fields of a response in progress."""

QUEUED_FIELDS: Mapping[str, Any] = {**IN_PROGRESS_FIELDS, "status": "queued"}
"""The result fields of a queued response."""

UNFINISHED_STATUSES = frozenset({"queued", "in_progress"})
"""Statuses of a response that has not ended."""


def build_request_fields(key: str, created_at: int, body: Body, *, store: bool) -> dict[str, Any]:
    """Build the request fields."""
    tier: str = body.get("service_tier") or "auto"
    conversation = body.get("conversation")
    text: Body = body.get("text") or {}
    form: Body = text.get("format") or {"type": "text"}
    if form["type"] == "json_schema":
        form = {"description": None, "strict": False, **form}
    resource: dict[str, Any] = {
        "id": f"resp_{key}",
        "object": "response",
        "created_at": created_at,
        "model": body["model"],
        "conversation": {"id": conversation} if isinstance(conversation, str) else conversation,
        "store": store,
        "metadata": body.get("metadata") or {},
        "text": {**text, "verbosity": text.get("verbosity") or "medium", "format": form},
        "reasoning": {"effort": None, "summary": None, **(body.get("reasoning") or {})},
        "service_tier": SERVICE_TIERS.get(tier, tier),
        "tools": list(map(_fill_tool_defaults, body.get("tools") or ())),
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        **DEFAULTS,
    }
    for name in DEFAULTS.keys() & body.keys():
        if body[name] is not None:
            resource[name] = body[name]
    return resource


def build_finished_fields(
    *, reason: str | None, now: int, usage: Mapping[str, Any]
) -> dict[str, Any]:
    """Build the result fields of a completed response or, with a ``reason``, of an incomplete one."""
    if reason is None:
        return {**IN_PROGRESS_FIELDS, "status": "completed", "completed_at": now, "usage": usage}
    details = {"reason": reason}
    return {
        **IN_PROGRESS_FIELDS,
        "status": "incomplete",
        "incomplete_details": details,
        "usage": usage,
    }


STOPPED_MESSAGE = "The server was stopped before this response was finished."
RESTARTED_MESSAGE = "The server was restarted before this response was finished."
FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""The code of a failed response by the HTTP status of its error; otherwise ``server_error``."""


def build_failed_fields(status: str, cause: ApiError | str | None = None) -> dict[str, Any]:
    """Build the result fields of a response that ``failed`` or was ``cancelled``.

    Args:
        status: One of these two.
        cause: The error of the model, or a message; by default an internal error.
    """
    fields: dict[str, Any] = {**IN_PROGRESS_FIELDS, "status": status}
    if status == "failed":
        error = cause if isinstance(cause, ApiError) else INTERNAL_ERROR()
        message = cause if isinstance(cause, str) else error.message
        code = FAILURE_CODES.get(error.status, "server_error")
        fields["error"] = {"code": code, "message": message}
    return fields


def build_usage(usage: "ModelUsage") -> dict[str, Any]:
    """Build the ``usage`` object."""
    written = 0
    if usage.input >= MIN_CACHED_TOKENS:
        written = usage.input - usage.cached
    return {
        "input_tokens": usage.input,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": written},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.input + usage.output,
    }


def join_response(request_json: bytes, result_json: bytes, output: bytes) -> bytes:
    """Join the encoded parts of a response, which are stored separately."""
    return b'%b,%b,"output":%b}' % (request_json[:-1], result_json[1:-1], output)


def _fill_tool_defaults(tool: Body) -> Body:
    if tool.get("type") != "function":
        return tool
    return {"description": None, "parameters": None, "strict": True, **tool}
