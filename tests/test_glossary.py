"""Check the glossary, the names and the wording of the source against the project's rules.

The rules: one term per concept and one class per name; functions are verbs, classes nouns, modules
concepts; docstrings, messages and docs are plain technical English. Exceptions are listed with a reason.
"""

import ast
import functools
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from io import StringIO
from pathlib import Path

import source_trees

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
MODULES = sorted((SOURCE / "kedge").rglob("*.py"))
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| \*\*(?P<term>[^*]+)\*\* \| (?P<meaning>.+) \| `(?P<home>kedge[\w.]*)` \|$", re.MULTILINE
)

Function = ast.FunctionDef | ast.AsyncFunctionDef

REQUIRED_TERMS = {
    *("Block", "Turn", "Engine", "Middleware", "Request", "Response", "Anchor", "Delta", "Plan"),
    *("Chain", "Event", "Conversation", "Node", "Branch", "Head", "Store", "State", "Tool"),
    *("ToolCall", "Tool result", "Reasoning", "Compaction", "Evidence", "Healing", "Reply"),
}

SHARED_CLASS_NAMES: dict[str, str] = {
    "SocketConnection": "the two ends of one connection; the server shares no code with engines"
}

NOUN_MODULES = {
    "planning": "a layer, named by design.md",
    "testing": "a package of test helpers, as in other libraries",
}

ODD_FUNCTIONS: dict[str, str] = {
    "kedge.conversation.conversation.pending": "public; the calls that are pending",
    "kedge.server.storage.context.__reversed__": "Python's name of the method",
    "kedge.server.uvicorn_server.connection_made": "asyncio's name of the method",
    "kedge.store.store.pending": "public; the nodes that are pending",
    "kedge.turns.blocks.reasoning": "a root name: the constructor of a reasoning block",
}


BANNED_VERBS = {
    *("asked", "brought", "given", "gone", "heard", "kept", "made", "meant", "mend", "mended"),
    *("met", "said", "say", "says", "shown", "spoken", "stands", "taken", "tell", "tells", "told"),
    *("vouched", "whoever"),
}
NOT_PARTICIPLES = {"embed", "feed", "need", "proceed", "seed", "speed", "bring", "ping", "string"}


BANNED_PHRASES = (
    r"a mistake in kedge",
    r"canceled",  # the API writes cancelled
    r"heard",
    r"honest(?:ly)?",
    r"mend(?:s|ed|ing)?",
    r"nobody",
    r"put away",
    r"said",
    r"signs? of life",
    r"somebody",
    r"spoken",
    r"stands?",
    r"talks?",
    r"tells?",
    r"that is too much",
    r"thoughts?",
    r"told",
    r"whoever",
)
WORDING_EXCEPTIONS: dict[str, str] = {
    "docs/practice.md": "sentences of the practice model",
    "src/kedge/practice/": "sentences of the practice model",
    "src/kedge/tools/__init__.py": "a public parameter is named tell",
    "src/kedge/web/templates/conversation.html": "a CSS class of the page",
    "src/kedge/workflows/judges.py": "prompts of stored workflows, which must not change",
}
QUOTED = re.compile(r"You said|have I said so far")
"""Sentences of the practice model that other pages quote."""
BANNED = re.compile(rf"\b(?:{'|'.join(BANNED_PHRASES)})\b", re.IGNORECASE)


@functools.cache
def list_nodes(path: Path) -> list[ast.AST]:
    """Return the nodes that the tests check, of one module."""
    kinds = ast.ClassDef | Function | ast.ImportFrom | ast.Import | ast.Constant
    return [node for node in source_trees.list_nodes()[path] if isinstance(node, kinds)]


def module_name(path: Path) -> str:
    """Return the dotted name of a module."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def iter_functions() -> Iterator[tuple[str, Function]]:
    """Yield every function and method with the name of its module."""
    for path in MODULES:
        for node in list_nodes(path):
            if isinstance(node, Function):
                yield module_name(path), node


def resolve(name: str) -> object:
    """Return the module, class or member of this dotted name.

    Raises:
        AttributeError: It does not exist.
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: object = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise AttributeError(name)


def is_property(node: Function) -> bool:
    """Return whether a function is used as an attribute, which may be a noun or an adjective."""
    names = {ast.unparse(each).split("(")[0].split(".")[-1] for each in node.decorator_list}
    return bool(names & {"property", "cached_property", "setter"})


def is_participle(word: str) -> bool:
    """Return whether a word looks like a gerund or a participle."""
    return bool(re.search(r"..(?:ed|ing)$", word)) and word not in NOT_PARTICIPLES


def iter_strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments, docstrings and other literals of a module, or the lines of another file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        prose = re.sub(r"<[^>]*>|{%.*?%}", " ", text) if path.suffix == ".html" else text
        yield from enumerate(prose.splitlines(), 1)
        return
    for node in list_nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for offset, line in enumerate(node.value.split("\n")):
                yield node.lineno + offset, line
    if not BANNED.search(text):
        return  # so that few modules are split into tokens, which is slow
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def list_texts() -> Iterator[Path]:
    """Yield every file whose wording is checked."""
    yield from MODULES
    yield from sorted((SOURCE / "kedge").rglob("*.html"))
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def test_every_term_is_defined_once_and_exists() -> None:
    """Each row of the glossary names an existing module, class or member."""
    rows = list(ROW.finditer(GLOSSARY))
    terms = [row["term"] for row in rows]
    assert len(rows) == len(re.findall(r"^\| \*\*", GLOSSARY, re.MULTILINE))
    assert len(set(terms)) == len(terms)
    assert set(terms) >= REQUIRED_TERMS
    for row in rows:
        assert resolve(row["home"]) is not None, row["home"]


def test_one_class_name_has_one_meaning() -> None:
    """No class name is defined in two modules."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in list_nodes(path):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(module_name(path))
    shared = {name: paths for name, paths in modules.items() if len(paths) > 1}
    assert {name: paths for name, paths in shared.items() if name not in SHARED_CLASS_NAMES} == {}


def test_modules_are_named_by_concepts() -> None:
    """No gerund or participle names a module or a package, except nouns of the field."""
    names = {part for path in MODULES for part in module_name(path).split(".")[1:]}
    odd = {name for name in names if is_participle(name.split("_")[-1])}
    assert odd - set(NOUN_MODULES) == set()


def test_functions_are_named_by_verbs() -> None:
    """No function name is a single participle, and none uses a verb of speech for data."""
    odd = {
        f"{module}.{node.name}"
        for module, node in iter_functions()
        if not is_property(node) and is_odd_name(node.name.strip("_"))
    }
    assert odd - set(ODD_FUNCTIONS) == set()


def is_odd_name(name: str) -> bool:
    """Return whether a function's name is a single participle or contains a banned verb."""
    words = name.split("_")
    if words[0] in ("is", "has"):
        return False
    return bool(set(words) & BANNED_VERBS) or (len(words) == 1 and is_participle(name))


def test_the_wording_is_plain() -> None:
    """Comments, docstrings, messages, templates and docs contain no banned phrase."""
    problems = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in list_texts()
        if not str(path.relative_to(ROOT)).startswith(tuple(WORDING_EXCEPTIONS))
        for number, line in iter_strings(path)
        if BANNED.search(QUOTED.sub("", line))
    ]
    assert problems == []
