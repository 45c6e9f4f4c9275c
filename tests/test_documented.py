"""Tests that public names are documented and that the numbers in the docs match the code.

The tests beside the code (``tests/*/test_docs_*.py``) compare tables with it: events, routes of the
server and of the page, operations of the API, faults, settings, metrics, commands and options. This module checks
the rest. Each check returns what is missing, so that a test can pass it a name that does not exist.
"""

import ast
import functools
import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, get_args
from unittest.mock import Mock

import pytest
from starlette.routing import Route

import kedge
from kedge import compaction, engines, errors, mcp, middleware, tokens
from kedge.backends import engine_model
from kedge.batch import rate_limit
from kedge.batch.run import DEFAULT_LEASE
from kedge.chat import state as chat_state
from kedge.cli.chat_session import SLASH_COMMANDS
from kedge.compaction import compactors
from kedge.config import SETTINGS
from kedge.conversation import lazy_conversation
from kedge.conversation import run as conversation_run
from kedge.database import sqlite
from kedge.engines import anthropic as anthropic_engine
from kedge.engines import http_client, prompt_cache, request_options, transport
from kedge.engines.websocket import connection
from kedge.events.run import ResendReason
from kedge.incremental import index, rewrite
from kedge.mcp import content as mcp_content
from kedge.mcp import server as mcp_server
from kedge.mcp import transports as mcp_transports
from kedge.memory import evidence
from kedge.observe import metrics
from kedge.planning import anchors
from kedge.planning.cache_plan import CacheHint, CacheMiss
from kedge.practice import context as practice_context
from kedge.practice import model as practice_model
from kedge.practice import text_rules
from kedge.providers import clients, practice_memory
from kedge.proxy import create_proxy_app
from kedge.server import app as server_app
from kedge.server import background
from kedge.server import prompt_cache as server_cache
from kedge.server.schema import requests, validators
from kedge.server.settings import Limits, Settings
from kedge.server.storage import database as server_database
from kedge.server.storage.postgres import MAX_ATTEMPTS
from kedge.store import import_export, open_store, response_sums, search, token_registry
from kedge.store import open as store_open
from kedge.store.search_query import TEXT_INDEXES
from kedge.tools import MAX_RETRY_WAIT, Tool
from kedge.turns import attachments, frozen_json, json_codec
from kedge.web import api, openapi, schemas, security, shapes
from kedge.workflows.results import WorkflowEvent

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "kedge"
PAGES = {
    str(path.relative_to(ROOT / "docs")): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "docs").rglob("*.md"))
}
WRITTEN = "\n".join(text for name, text in PAGES.items() if not name.startswith("reference/"))
REFERENCE = [
    name[len("reference/") : -len(".md")] for name in PAGES if name.startswith("reference/")
]
ENVIRONMENT = re.compile(
    r"(ANTHROPIC|AZURE|ENABLE|KEDGE|NO|OLLAMA|OPENAI|OTEL|XAI|XDG)_[A-Z_]+(?<!_TIERS)"
)


def find_unmentioned(names: Iterable[str], text: str = WRITTEN) -> list[str]:
    """Return the names that the text does not contain as words."""
    return [name for name in names if not re.search(rf"(?<![\w.]){re.escape(name)}\b", text)]


def list_public(module: str) -> list[str]:
    """Return the public names of a module: its ``__all__``, or what it defines itself."""
    imported = import_module(f"kedge.{module}")
    names = (
        name for name, value in vars(imported).items() if is_defined_in(value, imported.__name__)
    )
    return list(getattr(imported, "__all__", names))


def is_defined_in(value: object, module: str) -> bool:
    """Return whether a class or function belongs to a module and is public."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return False
    return value.__module__ == module and not value.__name__.startswith("_")


def find_source(module: str) -> Path:
    """Return the file of a module."""
    path = SOURCE.parent.joinpath(*module.split("."))
    package = path / "__init__.py"
    return package if package.exists() else path.with_suffix(".py")


@functools.cache
def parse_body(module: str) -> list[ast.stmt]:
    """Return the statements of a module, including those below a condition."""
    body = ast.parse(find_source(module).read_text(encoding="utf-8")).body
    return [*body, *(child for node in body if isinstance(node, ast.If) for child in node.body)]


def is_documented(module: str, name: str) -> bool:
    """Return whether a name has a docstring, or a string below its assignment, where it is defined."""
    body = parse_body(module)
    for node, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        match node:
            case (
                ast.ClassDef(name=found)
                | ast.FunctionDef(name=found)
                | ast.AsyncFunctionDef(name=found)
            ):
                if found == name and ast.get_docstring(node):  # overloads have none
                    return True
            case (
                ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found))
            ):
                if found == name:
                    return isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            case ast.ImportFrom(module=source, names=imported):
                if any((each.asname or each.name) == name for each in imported):
                    return is_documented(str(source), name)
            case _:
                pass
    return False


def find_undocumented(module: str, names: Iterable[str]) -> list[str]:
    """Return the names that the reference page of a module does not show.

    The page shows names with a docstring. A function with the name of its submodule needs a separate line.
    """
    page = PAGES[f"reference/{module}.md"]
    hidden = {path.stem for path in (SOURCE / module).glob("*")}
    return [
        name
        for name in names
        if not is_documented(f"kedge.{module}", name)
        or (name in hidden and f"::: kedge.{module}.{name}.{name}\n" not in page)
    ]


@pytest.mark.parametrize("module", REFERENCE)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    """A public name has a docstring, without which the generated page would omit it."""
    assert find_undocumented(module, list_public(module)) == []


STREAMS = {"ChatStream", "ConversationStream", "RunStream", "Stream"}
"""Public classes that only Kedge constructs."""


def list_callables(module: str) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public functions, constructors and methods of a module with their names."""
    for name in list_public(module):
        value = getattr(import_module(f"kedge.{module}"), name)
        if inspect.isfunction(value):
            yield name, value
        if inspect.isclass(value):
            if "__init__" in vars(value) and not is_dataclass(value) and name not in STREAMS:
                yield name, value
            for member in vars(value):
                method = getattr(value, member)
                if not member.startswith("_") and isinstance(method, FunctionType | MethodType):
                    yield f"{name}.{member}", method


def find_undescribed(function: Callable[..., Any]) -> list[str]:
    """Return the optional parameters that a docstring neither names nor leaves to another one."""
    described = f"{inspect.getdoc(function)}\n{inspect.getdoc(getattr(function, '__init__', None))}"
    if re.search(r"\b(see|those of) `", described, re.IGNORECASE):
        return []
    return [
        each.name
        for each in inspect.signature(function).parameters.values()
        if (each.kind is each.KEYWORD_ONLY or each.default is not each.empty)
        and not each.name.startswith("_")
        and not re.search(rf"\b{each.name}\b", described)
    ]


@pytest.mark.parametrize("module", REFERENCE)
def test_every_option_is_described(module: str) -> None:
    """The docstring of a public function, class or method names its optional parameters."""
    missing = {name: find_undescribed(function) for name, function in list_callables(module)}
    assert {name: options for name, options in missing.items() if options} == {}


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
        f"longer than {sqlite.INLINE_WAIT_SECONDS * 1000:g} ms",
        f"client_max_body_size {rewrite.MAX_BODY_BYTES >> 20}m;",
    ],
    "api.md": [
        f"up to {schemas.MAX_ATTACHMENTS} images or files of {MAX_ATTACHMENT_MB} MB each",
        f"body of {api.MAX_TURN_BYTES // 10**6} MB",
        f"413 above {openapi.MAX_BODY_BYTES // 10**6} MB ({api.MAX_TURN_BYTES // 10**6} MB for a",
    ],
    "backends.md": [
        f"(or after {engine_model.DEFAULT_GRACE:.0f} seconds)",
        f"{engine_model.MAX_LOGGED_REASON} characters of the provider's reason",
        f"(default {engine_model.DEFAULT_WINDOW:,})",
    ],
    "batch.md": [f"up to `lease` seconds ({DEFAULT_LEASE:.0f})"],
    "cli.md": [f"127.0.0.1 and {SETTINGS['proxy.port'].default} by default"],
    "compaction.md": [
        f"target_tokens={compactors.DEFAULT_TARGET_RATIO:.0%}".replace("%", " %"),
        "ToolExchangeCompactor({})".format(
            ", ".join(
                f"{name}={default(compaction.ToolExchangeCompactor, name)}"
                for name in ("max_characters", "keep_exchanges", "min_saving")
            )
        ),
    ],
    "conversations.md": [f"`lease={conversation_run.DEFAULT_LEASE}`"],
    "engines.md": [
        f"({anthropic_engine.DEFAULT_MAX_TOKENS} tokens, plus the thinking",
        f"`connections={default(engines.ResponsesEngine, 'connections')}`",
        f"`lanes={default(engines.ResponsesEngine, 'lanes')}`",
        f"replaced after {connection.MAX_CONNECTION_AGE / MINUTE:.0f} minutes",
        f"may be {connection.MAX_BUFFERED_BYTES >> 20} MB behind",
        f"`max_retries` ({http_client.DEFAULT_MAX_RETRIES}) times",
        f"the wait for a connection ({http_client.Timeouts().connect:.0f} seconds)",
        f"the next bytes of a response ({http_client.Timeouts().read:.0f} seconds)",
    ],
    "guides/recipes.md": [f"stored for {Settings().retention / DAY:.0f} days"],
    "guides/postgresql.md": [
        f"about {Limits().lease_seconds + server_app.WATCH_SECONDS:.0f} seconds"
    ],
    "json-form.md": [f"integers of up to {frozen_json.MAX_INTEGER_BITS} bits"],
    "mcp.md": [
        f"one call ({mcp.DEFAULT_TIMEOUT:.0f})",
        f"listed its tools ({mcp.DEFAULT_CONNECT_TIMEOUT:.0f})",
        f"{mcp_content.MAX_TOOLS} tools, {mcp_content.MAX_DESCRIPTION_CHARS:,} characters",
        f"{mcp_content.MAX_SCHEMA_CHARS:,} of a schema, {mcp_content.MAX_CONTENT_ITEMS} items",
        f"{transport.MAX_RESPONSE_BYTES >> 20} MiB of a message",
        f"{mcp_server.MAX_OUTPUT:,} characters",
        f"http://127.0.0.1:{SETTINGS['mcp.port'].default}/mcp",
    ],
    "middleware.md": [
        f"max_rounds={default(middleware.tools, 'max_rounds')})",
        f"`retry(attempts={default(middleware.retry, 'attempts')})`",
    ],
    "observability.md": [f"after the first {metrics.MAX_SERIES}"],
    "concepts/invariant.md": [f"({anchors.DEFAULT_RETENTION / DAY:.0f} days by default)"],
    "practice.md": [
        f"(up to {text_rules.MAX_WORDS:,} words)",
        f"a chunk every {practice_context.SLOW} seconds, `very slowly` every {practice_context.VERY_SLOW}",
        f"at that interval (at most {practice_context.MAX_PACE:.0f})",
        f"chunks, at most {practice_model.MAX_PACE:.0f}\n",
        f"above {practice_memory.MAX_MEMORY_BYTES // 10**6} MB the oldest",
    ],
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
        f"every {background.STORE_SECONDS} seconds at most",
        f"every {background.MIN_POLL_SECONDS} to {background.MAX_POLL_SECONDS} seconds",
        f"without indexes, at most {validators.MAX_IGNORED_PATHS}:",
    ],
    "store.md": [
        f"`body_bytes` ({default(open_store, 'body_bytes') >> 20} MiB)",
        f"`rank`, the best matches of the newest {search.MAX_RANKED:,} first",
        f"groups of {TEXT_INDEXES['sqlite'].texts_per_group:,} blocks",
        f"up to {lazy_conversation.MAX_LOADED_BLOCKS:,} blocks are loaded at once",
        f"a batch of {response_sums.BATCH_SIZE} responses",
    ],
    "tools.md": [
        f"first retry ({default(Tool, 'retry_wait')}), doubled each time",
        f"each time, at most {MAX_RETRY_WAIT:.0f} |",
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
    "workflows.md": [f"expired ({conversation_run.DEFAULT_LEASE:.0f} seconds"],
}
"""Page -> texts that it must contain, built from the constants and defaults of the code."""


@pytest.mark.parametrize("page", NUMBERS)
def test_the_numbers_on_a_page_match_the_code(page: str) -> None:
    """A page contains the limits, defaults, lifetimes and sizes of the code."""
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


def test_delays_and_retries_in_prose_match_the_code() -> None:
    """Expressions such as "a minute" and "twice" match the constants of the code."""
    assert (evidence.BASE_COOLDOWN, evidence.MAX_COOLDOWN) == (MINUTE, HOUR)
    for page in ("adoption.md", "engines.md"):
        assert re.search(r"for a\s+minute", PAGES[page])
        assert "up to an hour" in PAGES[page]
    assert request_options.DEFAULT_OUTPUT_RETRIES == 2
    assert "twice by default" in PAGES["typed-output.md"]
    assert mcp_transports.GRACE_SECONDS == 2
    assert "after two\n  seconds the group is terminated" in PAGES["mcp.md"]
    assert security.LOGIN_WINDOW_SECONDS == MINUTE
    assert http_client.MAX_RETRY_AFTER == 2 * MINUTE
    assert "at most two minutes" in PAGES["engines.md"]
    assert evidence.MAX_ERRORS == 2
    assert "After two in a row" in PAGES["engines.md"]
    assert "After two server errors in a row" in PAGES["adoption.md"]
    assert (evidence.HOLD_SECONDS, evidence.MAX_HOLD_SECONDS) == (HOUR, DAY)
    assert "held back for an hour, after further losses for up to a day" in PAGES["engines.md"]
    assert evidence.CONTRADICTION_SECONDS == DAY
    assert "probes of this server are ignored for a day" in PAGES["adoption.md"]
    assert index.RETRY_SECONDS == 5
    assert "for the next five seconds" in PAGES["adoption.md"]
    assert rate_limit.WINDOW_SECONDS == 60
    assert "window of sixty seconds" in PAGES["batch.md"]
    assert len(conversation_run.SAVE_PAUSES) == 2
    assert "also after two more attempts" in PAGES["errors.md"]
    assert Settings().purge_every == HOUR
    assert "at startup and every hour" in PAGES["server.md"]
    assert shapes.EXPIRING_SECONDS == DAY
    assert "`copy expires soon` (the provider's, within a day)" in PAGES["web.md"]
    assert token_registry.RECHECK_SECONDS == 1
    assert "looks at its store once a second" in PAGES["users.md"]


def test_the_checks_report_missing_names() -> None:
    """Each check reports a name that does not exist."""
    assert find_unmentioned(["Turn", "TurnOfTheScrew", "KEDGE_NO_SUCH"]) == [
        "TurnOfTheScrew",
        "KEDGE_NO_SUCH",
    ]
    assert find_undocumented("chat", ["Chat", "NoSuchName"]) == ["NoSuchName"]
    assert find_undocumented("errors", ["KedgeError", "NoSuchError"]) == ["NoSuchError"]
    assert find_undescribed(lambda size=1: size) == ["size"]
