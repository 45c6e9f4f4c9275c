"""Tests that public names are documented and that the numbers in the docs match the code.

The tests beside the code (``tests/*/test_docs_*.py``) compare tables with it: events, routes of the
server and of the page, operations of the API, faults, settings, metrics, commands and options. This module checks
the rest. Each check returns what is missing, so that a test can pass it a name that does not exist.
"""

import inspect
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
from starlette.routing import Route

import kedge
from kedge import errors, tokens
from kedge.chat import state as chat_state
from kedge.cli.chat_session import SLASH_COMMANDS
from kedge.config import SETTINGS
from kedge.conversation import lazy_conversation
from kedge.engines import prompt_cache, transport
from kedge.engines.websocket import connection
from kedge.events.run import ResendReason
from kedge.incremental import index, rewrite
from kedge.mcp import content as mcp_content
from kedge.mcp import server as mcp_server
from kedge.memory import evidence
from kedge.observe import metrics
from kedge.planning import anchors
from kedge.planning.cache_plan import CacheHint, CacheMiss
from kedge.providers import clients
from kedge.proxy import create_proxy_app
from kedge.server import app as server_app
from kedge.server import prompt_cache as server_cache
from kedge.server.schema import requests, validators
from kedge.server.settings import Limits, Settings
from kedge.server.storage import database as server_database
from kedge.server.storage.postgres import MAX_ATTEMPTS
from kedge.store import import_export, open_store, search
from kedge.store import open as store_open
from kedge.tools import ToolOutcome
from kedge.tools.tool import ExecutionOptions
from kedge.turns import attachments, frozen_json, json_codec
from kedge.web import api, openapi, schemas, security
from kedge.workflows.results import WorkflowEvent

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "kedge"
PAGES = {
    str(path.relative_to(ROOT / "docs")): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").rglob("*.md"))
}
WRITTEN = "\n".join(text for name, text in PAGES.items() if not name.startswith("reference/"))
ENVIRONMENT = re.compile(
    r"(ANTHROPIC|AZURE|ENABLE|KEDGE|NO|OLLAMA|OPENAI|OTEL|XAI|XDG)_[A-Z_]+(?<!_TIERS)"
)


def find_unmentioned(names: Iterable[str], text: str = WRITTEN) -> list[str]:
    """Return the names that the text does not contain as words."""
    return [name for name in names if not re.search(rf"(?<![\w.]){re.escape(name)}\b", text)]


def test_every_root_name_is_on_a_page() -> None:
    """Every root name is on a page outside of the generated reference."""
    assert find_unmentioned(kedge.__all__) == []


def test_every_error_is_documented() -> None:
    """Every error class is on docs/errors.md, which states its cause and remedy."""
    names = [
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.KedgeError)
    ]
    assert len(names) > 40
    assert find_unmentioned(names, PAGES["errors.md"]) == []


def test_every_environment_variable_is_on_a_page() -> None:
    """Every environment variable in the source and in the settings is on a page."""
    source = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    names = {text for text in re.findall(r'"(\w+)"', source) if ENVIRONMENT.fullmatch(text)}
    assert {"OPENAI_API_KEY", "OLLAMA_HOST", "KEDGE_PRICES"} <= names
    assert find_unmentioned(sorted(names | {each.env for each in SETTINGS.values()})) == []


def test_every_setting_of_the_test_server_is_documented() -> None:
    """Every keyword of ``kedge.testing.serve`` is on docs/server.md."""
    names = [f"`{name}`" for name in Settings.__dataclass_fields__]
    assert [name for name in names if name not in PAGES["server.md"]] == []


STORE_TOOLS = mcp_server.StoreTools(Mock(), Mock()).to_toolbox()
VALUES: dict[str, list[str]] = {
    "cli.md": [name for name, each in SLASH_COMMANDS.items() if each.help],
    "conversations.md": [name for name in vars(kedge.Conversation) if not name.startswith("_")],
    "engines.md": [*get_args(ResendReason), "format", *get_args(evidence.Trust)],
    "mcp.md": [each["name"] for each in STORE_TOOLS.definitions()],
    "prompt-caching.md": [*get_args(CacheHint), *filter(None, get_args(CacheMiss))],
    "server.md": [route.path for route in server_app.WEBSOCKET_ROUTES],
    "tools.md": [*ExecutionOptions.__annotations__, *get_args(ToolOutcome)],
    "workflows.md": [event.__name__ for event in get_args(WorkflowEvent)],
}
"""Page -> commands, methods, reasons, tools, routes and events that it must name."""


@pytest.mark.parametrize("page", VALUES)
def test_every_value_is_on_its_page(page: str) -> None:
    """A page names each value that a user may pass, call or receive."""
    assert VALUES[page]
    code = "\n".join(re.findall(r"`[^`\n]+`", PAGES[page]))
    assert [name for name in VALUES[page] if not re.search(rf"(?<!\w){name}\b", code)] == []


def test_every_route_of_the_proxy_is_documented() -> None:
    """Every route that the proxy does not forward is on docs/adoption.md."""
    proxy = create_proxy_app("http://127.0.0.1:9/v1")
    paths = {route.path for route in proxy.routes if isinstance(route, Route)} - {"/v1/{path:path}"}
    assert paths
    assert [path for path in paths if f"`{path}`" not in PAGES["adoption.md"]] == []


def test_every_reason_for_passing_through_is_documented() -> None:
    """The table of reasons on docs/adoption.md equals that of the code."""
    rows = [f"| `{name}` | {text} |" for name, text in rewrite.PASS_THROUGH_REASONS.items()]
    assert "\n".join(rows) in PAGES["adoption.md"]


def test_every_format_and_header_is_documented() -> None:
    """docs/formats.md has the version of each format, and every header, that the code writes."""
    page = PAGES["formats.md"]
    for shown in (
        f"`{json_codec.FORMAT}`, {json_codec.VERSION}; reads 1 |",
        f"| state of a `Chat` | {chat_state.VERSION};",
        f"`{import_export.FORMAT}`, {import_export.VERSION}; reads 1 |",
        f"| the store | {store_open.SCHEMA_VERSION} |",
        f"| the server's database | {server_database.SCHEMA_VERSION} |",
    ):
        assert shown in page
    assert f"`anthropic-version` is {clients.ANTHROPIC_VERSION}, unless" in page
    source = "".join(path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    headers = set(re.findall(r'"((?:x-kedge-|kedge-server)[a-z-]*)"', source))
    assert "x-kedge-plan" in headers
    assert sorted(re.findall(r"^\| `((?:x-)?kedge-[a-z-]+)`", page, re.MULTILINE)) == sorted(
        headers
    )


def test_every_dependency_and_extra_is_documented() -> None:
    """docs/installation.md has every dependency and extra; ``make install-size`` prints the table."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = PAGES["installation.md"]
    required = sorted(re.split(r"[^\w-]", each)[0] for each in project["dependencies"])
    assert sorted(re.findall(r"^\| `([\w-]+)` \| .+ \| \d", page, re.MULTILINE)) == required
    extras = sorted(project["optional-dependencies"])
    assert sorted(re.findall(r"^\| `kedge-llm\[(\w+)\]` \| .+ \|$", page, re.MULTILINE)) == extras


def default(function: Callable[..., Any], name: str) -> Any:
    """Return the default of a parameter."""
    return inspect.signature(function).parameters[name].default


def read_script_constant(name: str, constant: str) -> int:
    """Return the value of a constant in a script of the page."""
    text = (SOURCE / "web" / "static" / name).read_text(encoding="utf-8")
    (value,) = re.findall(rf"^const {constant} = ([\d_]+);$", text, re.MULTILINE)
    return int(value)


MINUTE, HOUR, DAY = 60, 3600, 86_400
MAX_ATTACHMENT_MB = schemas.MAX_ATTACHMENT_BYTES // 10**6
WORDS = {2: "two", 4: "four", 5: "five"}
MINIMUMS = tokens.MIN_TOKENS.values()
CACHE_MINIMUMS = f"{min(MINIMUMS)} to {max(MINIMUMS):,}"
NUMBERS: dict[str, list[str]] = {
    "adoption.md": [
        f"({index.MAX_ENTRIES:,} responses",
        f"client_max_body_size {rewrite.MAX_BODY_BYTES >> 20}m;",
    ],
    "api.md": [
        f"up to {schemas.MAX_ATTACHMENTS} images or files of {MAX_ATTACHMENT_MB} MB each",
        f"body of {api.MAX_TURN_BYTES // 10**6} MB",
        f"413 above {openapi.MAX_BODY_BYTES // 10**6} MB ({api.MAX_TURN_BYTES // 10**6} MB for a",
    ],
    "engines.md": [
        f"replaced after {connection.MAX_CONNECTION_AGE / MINUTE:.0f} minutes",
        f"may be {connection.MAX_BUFFERED_BYTES >> 20} MB behind",
    ],
    "guides/recipes.md": [f"stored for {Settings().retention / DAY:.0f} days"],
    "json-form.md": [f"integers of up to {frozen_json.MAX_INTEGER_BITS} bits"],
    "mcp.md": [
        f"{mcp_content.MAX_TOOLS} tools, {mcp_content.MAX_DESCRIPTION_CHARS:,} characters",
        f"{mcp_content.MAX_SCHEMA_CHARS:,} of a schema, {mcp_content.MAX_CONTENT_ITEMS} items",
        f"{transport.MAX_RESPONSE_BYTES >> 20} MiB of a message",
        f"{mcp_server.MAX_OUTPUT:,} characters",
    ],
    "observability.md": [f"after the first {metrics.MAX_SERIES}"],
    "concepts/invariant.md": [f"({anchors.DEFAULT_RETENTION / DAY:.0f} days by default)"],
    "prompt-caching.md": [
        f"prompts from {server_cache.MIN_CACHED_TOKENS:,} tokens on",
        f"up to {WORDS[prompt_cache.MAX_BREAKPOINTS]} `cache_control` breakpoints",
        f"more than {server_cache.MAX_LOOKBACK} blocks",
        f"minimum of the model on: {CACHE_MINIMUMS} tokens",
    ],
    "server.md": [
        f"nested more than {validators.MAX_DEPTH} levels",
        f"within {WORDS[requests.MAX_DISTANCE]} edits",
        f"in steps of {server_cache.CACHED_TOKENS_STEP}",
        f"{server_cache.DEFAULT_LIFETIME / MINUTE:.0f} minutes after the last use",
        f"that of the model: {CACHE_MINIMUMS} tokens, by default",
        f"tokens, by default {tokens.DEFAULT_MIN_TOKENS:,} |",
        f"add up to {requests.MAX_ITEMS_PER_REQUEST} items",
        f"a lease of {Limits().lease_seconds:.0f} seconds",
        f"After {WORDS[MAX_ATTEMPTS]} attempts a response is failed",
        f"cached in each replica, {Limits().cache_bytes >> 20} MB",
        f"without indexes, at most {validators.MAX_IGNORED_PATHS}:",
    ],
    "store.md": [
        f"`body_bytes` ({default(open_store, 'body_bytes') >> 20} MiB)",
        f"`rank`, the best matches of the newest {search.MAX_RANKED:,} first",
        f"up to {lazy_conversation.MAX_LOADED_BLOCKS:,} blocks are loaded at once",
    ],
    "turns.md": [
        f"`max_bytes` ({attachments.MAX_FILE_BYTES >> 20} MiB)",
        f"more than {frozen_json.MAX_INTEGER_BITS} bits",
    ],
    "web.md": [
        f"up to {schemas.MAX_ATTACHMENTS}, {MAX_ATTACHMENT_MB} MB each",
        f"each and {read_script_constant('attachments.js', 'MAX_TOTAL') // 10**6} MB in total",
        f"undone for {read_script_constant('manage.js', 'UNDO_SECONDS')} seconds",
        f"cookie for {security.SESSION_SECONDS // DAY} days",
        f"After {WORDS[security.MAX_LOGIN_FAILURES]} failed logins",
    ],
}
"""Page -> texts with limits and lifetimes that it must contain, built from the constants of the code."""


@pytest.mark.parametrize("page", NUMBERS)
def test_the_numbers_on_a_page_match_the_code(page: str) -> None:
    """A page contains the limits, lifetimes and sizes of the code."""
    assert [shown for shown in NUMBERS[page] if shown not in PAGES[page]] == []


def read_row(name: str) -> list[str]:
    """Return the cells of the first row with this name in the tables of docs/peers.md."""
    row = re.search(rf"^\| {re.escape(name)} \| (.+) \|$", PAGES["peers.md"], re.MULTILINE)
    assert row
    return row[1].replace("*", "").split(" | ")


def test_figures_of_the_readme_are_those_of_the_pages() -> None:
    """Measured results in the README equal those of the pages that describe the measurement."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    names = ("Kedge", "the bare client", "", "openai-agents", "LangGraph", "")
    results = zip(names, read_row("all incoherent requests"), read_row("all errors"), strict=True)
    assert [
        each for each in results if each[0] and "{} {} and {}".format(*each) not in readme
    ] == []
    assert f"(Kedge {read_row('bytes uploaded, best plan = 1')[0]})" in readme
    (shares,) = re.findall(r"\| (openai 0\.\d\d, .+?);", readme)
    for library, share in re.findall(r"([a-z-]+) (0\.\d\d)", shares):
        assert f"{share} ({library} " in PAGES["adoption.md"]


def test_the_checks_report_missing_names() -> None:
    """Each check reports a name that does not exist."""
    assert find_unmentioned(["Turn", "TurnOfTheScrew", "KEDGE_NO_SUCH"]) == [
        "TurnOfTheScrew",
        "KEDGE_NO_SUCH",
    ]
