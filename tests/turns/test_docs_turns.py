"""The documentation pages about Turns match the code."""

import json
import re
from pathlib import Path
from typing import Any, get_args

from msgspec import structs

from kedge import turns
from kedge.turns import Part, Turn, UserBlock, dump, dumps, load, loads
from kedge.turns.blocks import KNOWN_KINDS, KnownBlock
from kedge.turns.frozen_json import json_equal
from kedge.turns.turn import TURN_MEMBERS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "json-form.md").read_text(encoding="utf-8")
EXAMPLE = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)


def page_section(title: str) -> str:
    """Return a section of the page about the JSON form."""
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def table_rows(text: str) -> list[list[str]]:
    """Return the rows of the tables in a text, without headers."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    rules = [index for index, row in enumerate(rows) if set(row[0]) <= {"-"} and row[0]]
    return [row for i, row in enumerate(rows) if i not in rules and i + 1 not in rules]


def documented_members(title: str) -> dict[str, dict[str, str]]:
    """Return the members and defaults of each kind or type in a section's last table."""
    tables: dict[str, dict[str, str]] = {}
    kind = ""
    for row in (row for row in table_rows(page_section(title)) if len(row) == 4):
        kind = row[0].strip("`") or kind
        tables.setdefault(kind, {})[row[1].strip("`")] = row[3].strip("`")
    return tables


def struct_members(cls: Any, *without: str) -> dict[str, str]:
    """Return the members of a block or part, with their defaults as JSON."""
    return {
        each.name: "" if each.required else json.dumps(each.default)
        for each in structs.fields(cls)
        if each.name not in (*without, "extra")
    }


def test_documented_kinds_and_members_match_the_code() -> None:
    """The page lists exactly the kinds, types, members and defaults of the code."""
    identity = ("id", "metadata", "origin", "source")
    assert documented_members("Blocks") == {
        cls.kind: struct_members(cls, *identity) for cls in get_args(KnownBlock)
    }
    assert documented_members("Parts") == {
        cls.__struct_config__.tag: struct_members(cls) for cls in get_args(Part)
    }
    assert {row[0].strip("`") for row in table_rows(page_section("The Turn"))} == TURN_MEMBERS
    assert {
        row[0].strip("`") for row in table_rows(page_section("Blocks")) if len(row) == 3
    } == set(identity)


def test_the_example_on_the_page_round_trips() -> None:
    """The example has every kind of block and type of part, and is unchanged after a round trip."""
    assert EXAMPLE is not None
    form = json.loads(EXAMPLE[1])
    turn = load(form)
    assert json_equal(dump(turn), form)
    assert json_equal(json.loads(dumps(loads(EXAMPLE[1]))), form)
    assert {block.kind for block in turn} == KNOWN_KINDS
    parts = {type(part) for block in turn for part in getattr(block, "parts", ())}
    assert parts == set(get_args(Part))


def test_every_name_is_on_the_turns_page() -> None:
    """The page about Turns names every constructor, block, part and operation."""
    page = (DOCS / "turns.md").read_text(encoding="utf-8")
    classes = [name for name in turns.__all__ if name.endswith(("Block", "Part"))]
    makers = ["user", "assistant", "system", "tool_call", "tool_result", "reasoning", "opaque"]
    operations = [name for name in vars(Turn) if not name.startswith("_")]
    known = {"Part", "blocks", "id", "lead", "extra", "index"}
    for name in {*classes, *makers, *operations, "diff", "dumps", "loads"} - known:
        assert re.search(rf"\b{name}\b", page), name
    for name in UserBlock.__struct_fields__:
        assert f"`{name}`" in page
