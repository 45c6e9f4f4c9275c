"""Tests of the operators: which mutants they generate of small functions, and which code they leave as it is."""

from dataclasses import replace

from for_each import for_each
from mutation.operators import generate_mutants

CASES = [
    ("negate-condition", "    if a:\n        b()", ["    if not (a):"]),
    ("negate-condition", "    x = b if a else c", ["    x = b if not (a) else c"]),
    ("negate-condition", "    x = [y for y in a if y]", ["    x = [y for y in a if not (y)]"]),
    ("negate-result", "    return a == b", ["    return not (a == b)"]),
    ("drop-not", "    if not a:\n        b()", ["    if (a):"]),
    ("swap-comparison", "    if a < b:\n        c()", ["    if a <= b:"]),
    ("swap-comparison", "    return a in b", ["    return a not in b"]),
    ("swap-and-or", "    return a and b", ["    return (a or b)"]),
    ("drop-operand", "    return a and b", ["    return (b)", "    return (a)"]),
    ("drop-statement", "    b()", ["    pass"]),
    ("drop-statement", "    a.b = c", ["    pass"]),
    ("drop-statement", "    a = b\n    a = c", ["    pass", "    pass"]),
    ("drop-statement", "    x = b", []),
    ("drop-raise", "    if a:\n        raise ValueError('a')", ["        pass"]),
    ("drop-return", "    if a:\n        return b\n    return c", ["        pass"]),
    ("drop-jump", "    for x in a:\n        continue", ["        pass"]),
    ("return-none", "    return a.b", ["    return None"]),
    ("return-none", "    return ()", []),
    ("change-number", "    return a[1]", ["    return a[2]", "    return a[0]"]),
    ("change-number", "    return b(timeout=1)", []),
    ("flip-boolean", "    b(c=True)", ["    b(c=False)"]),
    ("change-text", "    return a == 'lost'", ['    return a == ""']),
    ("change-text", "    return 'a sentence'", []),
    ("swap-plus-minus", "    return a - b", ["    return (a + b)"]),
    ("swap-plus-minus", "    return a + b", []),
    ("swap-function", "    return min(a)", ["    return max(a)"]),
    ("drop-shield", "    return await shield(a.b())", ["    return await a.b()"]),
    ("exchange-statements", "    a.b()\n    c.d = b", ["    c.d = b", "    a.b()"]),
    ("exchange-statements", "    a.b = c()\n    d(a.b)", []),
    ("exchange-statements", "    a.b = c()\n    a.d = c()", []),
]
"""An operator, the body of a function, and the lines of the changed bodies that are new."""


def list_changes(source: str, operator: str = "") -> list[str]:
    """Return the lines that the mutants of an operator change."""
    lines = source.splitlines()
    return [
        line
        for mutant in generate_mutants("sample.py", source)
        if mutant.operator == operator or not operator
        for number, line in enumerate(mutant.apply().splitlines())
        if line != lines[number]
    ]


@for_each(("operator", "body", "expected"), CASES)
def test_operators_change_one_place(operator: str, body: str, expected: list[str]) -> None:
    """Each operator changes what it names, and nothing where the change would hardly matter."""
    source = f"async def f(a, b, c):\n{body}\n"
    assert list_changes(source, operator) == expected


UNTESTED = [
    "def f():\n    log.warning('lost', 1)",
    "def f(a):\n    if a:\n        self._log.info(1)",
    "def log_request():\n    a(1)",
    'def f():\n    """Return 1."""',
    "def f():\n    assert a == 1",
    "def __repr__(self):\n    return a(1)",
    "@overload\ndef f(a=1): ...",
    "if TYPE_CHECKING:\n    def f():\n        return a(1)",
    "def f():\n    if TYPE_CHECKING:\n        a(1)",
    "def f(a: Literal['b'] = 1):\n    b: list[Literal['c']]",
    "A = 1",
]


@for_each("source", UNTESTED)
def test_what_no_test_should_pin_is_not_changed(source: str) -> None:
    """Log calls, docstrings, assertions, texts for readers, annotations and declarations have no mutants."""
    assert list_changes(source) == []


NESTED = """class Plan:
    def find(self):
        def check():
            return a(1)
        if b:
            return check
        return c or 1
"""


def test_a_mutant_is_addressed_by_function_operator_and_number() -> None:
    """The address has the qualified name, also of nested functions, and a number within function and operator."""
    mutants = generate_mutants("planning/plan.py", NESTED)
    addresses = [str(mutant) for mutant in mutants]
    assert "planning/plan.py::Plan.find negate-condition #1" in addresses
    assert "planning/plan.py::Plan.find.check change-number #2" in addresses
    assert len(set(addresses)) == len(addresses)
    moved = generate_mutants("planning/plan.py", f"def other():\n    a()\n\n{NESTED}")
    assert [str(mutant) for mutant in moved][1:] == addresses


def test_lines_are_those_of_the_changed_code_and_of_its_statement() -> None:
    """The statement of a condition is its header; bytes of other encodings do not shift the change."""
    source = "def f():\n    if (\n        'ä' in a and\n        b(1)\n    ):\n        c()\n"
    mutants = generate_mutants("sample.py", source)
    (number, _) = [mutant for mutant in mutants if mutant.operator == "change-number"]
    assert (number.lines, number.statement_lines) == (range(4, 5), range(2, 6))
    (swapped,) = [mutant for mutant in mutants if mutant.operator == "swap-comparison"]
    assert "        'ä' not in a and\n" in swapped.apply()


def test_a_change_without_effect_is_not_valid() -> None:
    """A mutant is another program, and it can be compiled."""
    source = "def f():\n    return a[1]\n"
    (mutant, _) = [
        each for each in generate_mutants("a.py", source) if each.operator == "change-number"
    ]
    assert mutant.is_valid()
    assert not replace(mutant, text="1").is_valid()
    assert not replace(mutant, text="(1").is_valid()
