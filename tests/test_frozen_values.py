"""Frozen values are set only where they are constructed or cache what is derived from them."""

import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "kedge"

SETTERS = {
    "backends/models_file.py": "copies the models of a file",
    "batch/run.py": "freezes parameters",
    "batch/files.py": "freezes parameters and schemas",
    "chat/state.py": "caches the Turn of a state",
    "compaction/base.py": "brings the fields of a request into one form",
    "engines/request_options.py": "freezes tools and parameters of a request",
    "events/types.py": "freezes the items of a server",
    "planning/anchors.py": "sorts the anchors",
    "server/faults/effects.py": "freezes the options of a fault",
    "server/schema/validators.py": "derives tables from the declaration of a validator",
    "tools/__init__.py": "freezes the arguments of an approver",
    "tools/tool.py": "derives the schema and the definition of a tool",
    "turns/blocks.py": "checks the fields of blocks, and caches their digests",
    "turns/frozen_json.py": "sets the members of a map, and caches its depth",
    "turns/parts.py": "checks the fields of parts and blocks",
    "turns/turn.py": "sets the fields of a Turn, which has no public setter",
}
"""The modules that set a field of a frozen value, each with its reason."""


def find_modules(pattern: str) -> set[str]:
    """Return the modules of the package with a line of code that matches."""
    return {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def test_frozen_values_are_set_only_where_listed() -> None:
    """Only the listed modules set fields of frozen values, and each of them does."""
    setter = r"^(?!\s*from ).*(\bobject\.__setattr__(\(|$)|\bforce_setattr\(|\]\.__set__\b)"
    assert find_modules(setter) == set(SETTERS)


def test_no_code_is_generated_and_no_class_is_swapped() -> None:
    """No module executes generated code or changes the class of an object."""
    assert find_modules(r"(?<![.\w])exec\(") == set()
    assert find_modules(r"\.__class__ = ") == set()
