"""The glossary refers to existing code: like links, the names in its last column have a target."""

import re
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ROW = re.compile(
    r"^\| \*\*(?P<term>[^*]+)\*\* \| (?P<meaning>.+) \| `(?P<home>kedge[\w.]*)` \|$", re.MULTILINE
)


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


def test_every_term_is_defined_once_and_exists() -> None:
    """Each row of the glossary names an existing module, class or member."""
    rows = list(ROW.finditer(GLOSSARY))
    terms = [row["term"] for row in rows]
    assert len(rows) == len(re.findall(r"^\| \*\*", GLOSSARY, re.MULTILINE))
    assert len(set(terms)) == len(terms)
    for row in rows:
        assert resolve(row["home"]) is not None, row["home"]
