"""Tests of the check for dense statements: it names what it must, and permits what reads well."""

from pathlib import Path

import pytest
from tests import dense_statements


def find(tmp_path: Path, source: str) -> list[tuple[int, str]]:
    """Return the line and problem of each dense statement of a source text."""
    (tmp_path / "module.py").write_text(source)
    modules = dense_statements.read_modules(tmp_path)
    return [(place.line, place.problem) for place in dense_statements.find_places(modules)]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("x = a if b else c if d else e", "a conditional expression in another"),
        ("x, y = 1, 2", "several assignments in one"),
        ("if a: b()", "two statements on a line"),
        (
            "def f():\n    pair = 1, 2\n    return g(*pair)",
            "arguments written apart from their call",
        ),
        (
            "def f():\n    named = {'a': 1}\n    g(**named)",
            "arguments written apart from their call",
        ),
        (
            "class A:\n    def run(self):\n        self.step = 1",
            "self.step is assigned before a constructor gives it a value",
        ),
        (
            "class A:\n    step: int\n    def run(self):\n        self.step = 1",
            "self.step is assigned before a constructor gives it a value",
        ),
    ],
)
def test_dense_statement_is_named(tmp_path, source, problem):
    """Each dense form is found on the line where it is."""
    assert [problem for _, problem in find(tmp_path, source)] == [problem]


@pytest.mark.parametrize(
    "source",
    [
        "x = a if b else c",
        "x, y = y, x",
        "x, y = f()",
        "a, b = b, a + b",
        "def f(pair):\n    return g(*pair)",
        "def f():\n    pair = 1, 2\n    g(*pair)\n    h(pair)",
        "class A:\n    def __init__(self):\n        self.step = 0\n    def run(self):\n        self.step = 1",
        "class A:\n    step = 0\n    def run(self):\n        self.step = 1",
        "@dataclass\nclass A:\n    step: int\n    def run(self):\n        self.step = 1",
        "class A(Elsewhere):\n    def run(self):\n        self.step = 1",
    ],
)
def test_plain_statement_is_permitted(tmp_path, source):
    """Simple choices, swaps, unpacked calls and declared attributes are no problem."""
    assert find(tmp_path, source) == []


def test_attribute_of_base_class_is_declared(tmp_path):
    """A class may assign what the constructor of its base, in another file, declares."""
    (tmp_path / "base.py").write_text(
        "class Base:\n    def __init__(self):\n        self.step = 0\n"
    )
    source = "class A(Base):\n    def run(self):\n        self.step = 1\n        self.late = 2\n"
    assert find(tmp_path, source) == [
        (4, "self.late is assigned before a constructor gives it a value")
    ]


def test_ternaries_are_counted_over_all_files(tmp_path):
    """One conditional expression is permitted in each fifty statements, and the fullest files are named."""
    (tmp_path / "full.py").write_text("x = a if b else c\n" * 2)
    (tmp_path / "plain.py").write_text("y = 1\n" * 98)
    modules = dense_statements.read_modules(tmp_path)
    assert dense_statements.find_excess_ternaries(modules) is None

    (tmp_path / "full.py").write_text("x = a if b else c\n" * 3)
    modules = dense_statements.read_modules(tmp_path)
    excess = dense_statements.find_excess_ternaries(modules)
    assert excess is not None
    assert "full.py (3)" in excess


def test_exit_code_reports_problems(tmp_path, capsys):
    """The command fails with the address of each problem, and also where it finds nothing to check."""
    (tmp_path / "module.py").write_text("x, y = 1, 2\n")
    assert dense_statements.main([str(tmp_path)]) == 1
    assert f"{tmp_path / 'module.py'}:1: several assignments in one" in capsys.readouterr().out

    (tmp_path / "module.py").write_text("x = 1\n")
    assert dense_statements.main([str(tmp_path)]) == 0

    assert dense_statements.main([str(tmp_path / "missing")]) == 2
