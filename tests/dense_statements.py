"""Find statements that say several things at once, and hold the limits on them.

    python tests/dense_statements.py [FOLDER]        default: src/kedge

`make check` runs it. Each place is named by file and line; CONTRIBUTING.md says what to write instead.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

TERNARIES_PER_1000 = 20
"""How many conditional expressions 1,000 statements may have, over the whole folder."""

CONSTRUCTORS = ("__init__", "__post_init__", "__new__")
COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try)
Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Place:
    """A dense statement: where it is, and what is wrong with it."""

    path: Path
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.problem}"


@dataclass(frozen=True)
class Module:
    """A parsed file."""

    path: Path
    tree: ast.Module

    def places(self, problem: str, nodes: Iterable[ast.stmt | ast.expr]) -> Iterator[Place]:
        """Yield a place for each node."""
        for node in nodes:
            yield Place(self.path, node.lineno, problem)


def read_modules(folder: Path) -> list[Module]:
    """Parse the Python files below a folder."""
    paths = sorted(folder.rglob("*.py"))
    return [Module(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def find_nested_ternaries(tree: ast.AST) -> Iterator[ast.IfExp]:
    """Yield the conditional expressions that contain another one directly."""
    for ternary in find_ternaries(tree):
        if any(isinstance(child, ast.IfExp) for child in ast.iter_child_nodes(ternary)):
            yield ternary


def find_ternaries(tree: ast.AST) -> Iterator[ast.IfExp]:
    """Yield the conditional expressions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            yield node


def find_tuple_assignments(tree: ast.AST) -> Iterator[ast.Assign]:
    """Yield the assignments of several values to several names, except those that exchange values."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Tuple) and not _is_exchange(target.elts, node.value.elts):
            yield node


def _is_exchange(targets: list[ast.expr], values: list[ast.expr]) -> bool:
    """Return whether a value is computed from a target, as in a swap: one statement each would be wrong."""
    names = [ast.unparse(target) for target in targets]
    for index, value in enumerate(values):
        parts = {ast.unparse(part) for part in ast.walk(value) if isinstance(part, ast.expr)}
        others = {name for position, name in enumerate(names) if position != index}
        if parts & others:
            return True
    return False


def find_joined_statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the compound statements whose body begins on their own line."""
    for node in ast.walk(tree):
        if isinstance(node, COMPOUND) and node.body[0].lineno == node.lineno:
            yield node


def find_starred_literals(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the arguments `*name` and `**name` of a tuple or dict that serves this call alone."""
    for function in ast.walk(tree):
        if isinstance(function, FUNCTIONS):
            yield from _find_starred_literals(function)


def _find_starred_literals(function: Function) -> Iterator[ast.expr]:
    literals: set[str] = set()
    assignments: Counter[str] = Counter()
    uses: Counter[str] = Counter()
    stars: dict[str, ast.expr] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.Dict):
            literals |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Name):
            count = uses if isinstance(node.ctx, ast.Load) else assignments
            count[node.id] += 1
        elif isinstance(node, ast.Call):
            starred = [arg.value for arg in node.args if isinstance(arg, ast.Starred)]
            starred += [keyword.value for keyword in node.keywords if keyword.arg is None]
            stars.update({value.id: value for value in starred if isinstance(value, ast.Name)})
    for name, argument in stars.items():
        if name in literals and assignments[name] == 1 and uses[name] == 1:
            yield argument


def find_late_attributes(modules: list[Module]) -> Iterator[Place]:
    """Yield the attributes that a method other than a constructor assigns first."""
    classes = Classes(modules)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                for attribute in classes.find_late_attributes(node):
                    problem = (
                        f"self.{attribute.attr} is assigned before a constructor gives it a value"
                    )
                    yield Place(module.path, attribute.lineno, problem)


class Classes:
    """The classes of all modules by name, to look up the attributes that bases declare."""

    # Annotations in classes that derive from these declare fields, which a generated constructor sets.
    FIELD_BASES = ("Struct", "NamedTuple", "TypedDict", "BaseModel", "Protocol", "Enum")
    # Their attributes are known without their source.
    PLAIN_BASES = ("ABC", "object", "Generic", "Exception", "Error", "ValueError", "RuntimeError")

    def __init__(self, modules: list[Module]) -> None:
        self.by_name: dict[str, ast.ClassDef] = {}
        for module in modules:
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    self.by_name[node.name] = node

    def find_late_attributes(self, node: ast.ClassDef) -> list[ast.Attribute]:
        """Return the first assignment of each attribute that no body or constructor of a class declares."""
        declared = self.find_declared(node)
        if declared is None:
            return []
        late: dict[str, ast.Attribute] = {}
        for method in node.body:
            if isinstance(method, FUNCTIONS) and method.name not in CONSTRUCTORS:
                for attribute in _assigned_attributes(method):
                    if attribute.attr not in declared:
                        late.setdefault(attribute.attr, attribute)
        return list(late.values())

    def find_declared(self, node: ast.ClassDef) -> set[str] | None:
        """Return the attributes that a class and its bases declare, or None if a base is from elsewhere."""
        declared = self._find_own(node)
        for base in _base_names(node):
            if base == node.name or base in self.PLAIN_BASES or base.endswith(self.FIELD_BASES):
                continue
            if base not in self.by_name:
                return None
            inherited = self.find_declared(self.by_name[base])
            if inherited is None:
                return None
            declared |= inherited
        return declared

    def _find_own(self, node: ast.ClassDef) -> set[str]:
        annotations_are_fields = self._has_fields(node)
        own: set[str] = set()
        for statement in node.body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name), value=value):
                    if annotations_are_fields or value is not None:
                        own.add(name)
                case ast.Assign(targets=targets):
                    own |= {target.id for target in targets if isinstance(target, ast.Name)}
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    own.add(name)
                    if name in CONSTRUCTORS:
                        own |= {attribute.attr for attribute in _assigned_attributes(statement)}
                case _:
                    pass
        return own

    def _has_fields(self, node: ast.ClassDef) -> bool:
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            return True
        for base in _base_names(node):
            if base.endswith(self.FIELD_BASES):
                return True
            if base != node.name and base in self.by_name and self._has_fields(self.by_name[base]):
                return True
        return False


def _base_names(node: ast.ClassDef) -> list[str]:
    """Return the names of the bases of a class, without modules and type arguments."""
    return [ast.unparse(base).split("[")[0].rsplit(".", 1)[-1] for base in node.bases]


def _assigned_attributes(method: ast.stmt) -> list[ast.Attribute]:
    """Return the attributes of self that a method assigns."""
    return [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]


def count_statements(tree: ast.AST) -> int:
    """Count the statements, docstrings aside."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]
    return sum(not _is_docstring(statement) for statement in statements)


def _is_docstring(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
        return False
    return isinstance(statement.value.value, str)


def find_places(modules: list[Module]) -> list[Place]:
    """Return every dense statement that is not permitted at all."""
    places: list[Place] = []
    for module in modules:
        tree = module.tree
        places += module.places("a conditional expression in another", find_nested_ternaries(tree))
        places += module.places("several assignments in one", find_tuple_assignments(tree))
        places += module.places("two statements on a line", find_joined_statements(tree))
        places += module.places(
            "arguments written apart from their call", find_starred_literals(tree)
        )
    places += find_late_attributes(modules)
    return sorted(places, key=lambda place: (place.path, place.line))


def find_excess_ternaries(modules: list[Module]) -> str | None:
    """Return which files have the most conditional expressions, if there are too many in all."""
    statements = sum(count_statements(module.tree) for module in modules)
    counts = {module.path: len(list(find_ternaries(module.tree))) for module in modules}
    total = sum(counts.values())
    if total * 1000 <= TERNARIES_PER_1000 * statements:
        return None
    worst = sorted(counts, key=counts.__getitem__, reverse=True)[:5]
    files = ", ".join(f"{path} ({counts[path]})" for path in worst)
    rate = 1000 * total / statements
    return (
        f"{rate:.1f} conditional expressions per 1,000 statements, more than {TERNARIES_PER_1000};"
        f" most are in {files}"
    )


def main(arguments: list[str]) -> int:
    """Print what was found, and return the exit code."""
    folder = Path(arguments[0] if arguments else "src/kedge")
    modules = read_modules(folder)
    if not modules:
        print(f"There are no Python files in {folder}", file=sys.stderr)
        return 2
    problems = [str(place) for place in find_places(modules)]
    excess = find_excess_ternaries(modules)
    if excess:
        problems.append(excess)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
