"""Generate mutants of a module from its syntax tree: small changes of its functions, each of which should fail a test.

A mutant is addressed by its module, the qualified name of its function, its operator and a number, so that its address
stays valid while other functions change: ``planning/plan.py::plan_request negate-condition #2``. It replaces a range of
the source, so that everything else keeps its line. What no test should pin is not changed: log calls, errors that are
raised, annotations, docstrings, assertions, f-strings and the text of ``__repr__``.
"""

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef
Expressions = Sequence[ast.expr | None]
EXCHANGED_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
"""Comparisons that differ at the boundary only."""
OPPOSITE_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
EXCHANGED_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGGERS = {"log", "logger", "logging", "warnings"}
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log", "warn"}
TEXT_FUNCTIONS = {"__repr__", "__str__", "__rich__"}
"""Functions whose result is for readers."""
UNTESTED_KEYWORDS = {"indent", "maxsize", "stacklevel", "strict", "timeout"}
"""Arguments that change the layout, the time limits or the assertions of what is called."""


@dataclass(frozen=True, slots=True)
class Change:
    """A changed source: a range of its bytes is replaced.

    Attributes:
        operator: The kind of change.
        node: The changed node.
        statement: The statement that contains it.
        start: The position of the first replaced byte.
        end: The position after the last one.
        text: The new source of this range.
    """

    operator: str
    node: ast.expr | ast.stmt
    statement: ast.stmt
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one function.

    Attributes:
        module: The path of the module in the package.
        function: The qualified name of the function.
        operator: The kind of change.
        number: Counts the changes of this kind in the function, from 1.
        lines: The lines of the changed code.
        statement_lines: The lines of the statement, or of its header, that contains the changed code.
        start: The position in the source, in bytes, of the first that is replaced.
        end: The position after the last one.
        text: The new source of this range.
        source: The source of the module, without the change.
    """

    module: str
    function: str
    operator: str
    number: int
    lines: range
    statement_lines: range
    start: int
    end: int
    text: str
    source: str = field(repr=False)

    def __str__(self) -> str:
        return f"{self.module}::{self.function} {self.operator} #{self.number}"

    def is_valid(self) -> bool:
        """Return whether the changed source of the module is a program, and another one."""
        try:
            changed = ast.parse(self.apply())
        except SyntaxError:
            return False
        return ast.dump(changed) != ast.dump(ast.parse(self.source))

    def apply(self) -> str:
        """Return the changed source of the module."""
        data = self.source.encode()
        changed = data[: self.start] + self.text.encode() + data[self.end :]
        return changed.decode()


def generate_mutants(module: str, source: str) -> list[Mutant]:
    """Return the mutants of a module, in the order of its source.

    Args:
        module: The path of the module in the package.
        source: Its source.
    """
    code = Source(source)
    mutants: list[Mutant] = []
    for name, function in _iter_functions(ast.parse(source).body, ""):
        numbers: Counter[str] = Counter()
        for change in FunctionChanges(function, code).collect():
            numbers[change.operator] += 1
            mutants.append(
                Mutant(
                    module,
                    name,
                    change.operator,
                    numbers[change.operator],
                    lines=range(change.node.lineno, (change.node.end_lineno or 0) + 1),
                    statement_lines=_get_header_lines(change.statement),
                    start=change.start,
                    end=change.end,
                    text=change.text,
                    source=source,
                )
            )
    return mutants


def _iter_functions(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
    """Yield the functions, also nested ones, with their qualified names."""
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            yield from _iter_functions(statement.body, f"{prefix}{statement.name}.")
        elif isinstance(statement, Function) and not _is_untested(statement):
            yield f"{prefix}{statement.name}", statement
            yield from _iter_functions(statement.body, f"{prefix}{statement.name}.")
        elif not isinstance(statement, Function) and not _is_type_checking(statement):
            for block in _get_blocks(statement):
                yield from _iter_functions(block, prefix)


def _is_untested(function: Function) -> bool:
    """Return whether a function returns a text for readers, only logs, or is a declaration for type checkers."""
    decorators = {_get_name(each) for each in function.decorator_list}
    is_log = function.name.lstrip("_").startswith("log_")
    return is_log or function.name in TEXT_FUNCTIONS or "overload" in decorators


def _is_type_checking(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)


def _get_blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of a compound statement, except those of classes and functions."""
    match statement:
        case ast.If() | ast.For() | ast.AsyncFor() | ast.While():
            yield from (statement.body, statement.orelse)
        case ast.With() | ast.AsyncWith():
            yield statement.body
        case ast.Try() | ast.TryStar():
            yield statement.body
            yield from (handler.body for handler in statement.handlers)
            yield from (statement.orelse, statement.finalbody)
        case ast.Match():
            yield from (case.body for case in statement.cases)
        case _:
            return


def _get_header_lines(statement: ast.stmt) -> range:
    """Return the lines of a simple statement, or those of a compound one before its first block."""
    starts = [block[0].lineno for block in _get_blocks(statement) if block]
    end = (statement.end_lineno or statement.lineno) + 1
    return range(statement.lineno, max(min([*starts, end]), statement.lineno + 1))


def is_log_call(node: ast.AST) -> bool:
    """Return whether a node is a call of a logger, or of a function that only logs."""
    if not isinstance(node, ast.Call):
        return False
    name = _get_name(node.func)
    owner = _get_name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    return name.startswith("log_") or (owner in LOGGERS and name in LOG_METHODS)


def _get_name(node: ast.expr) -> str:
    """Return the last part of a dotted name, without the underscore of private names."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.lstrip("_")
        case _:
            return ""


def _is_log_statement(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and is_log_call(statement.value)


class Source:
    """The source of a module, in bytes, of which the positions of nodes are."""

    def __init__(self, text: str) -> None:
        self._data = text.encode()
        self._line_starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def get_range(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the position of the first byte of a node, and the one after its last."""
        start = self._line_starts[node.lineno - 1] + node.col_offset
        end = self._line_starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        return start, end

    def get_text(self, start: int, end: int) -> str:
        """Return the text between two positions."""
        return self._data[start:end].decode()


class FunctionChanges:
    """Collects the changes of one function, without those of functions that it contains."""

    def __init__(self, function: Function, source: Source) -> None:
        self._function = function
        self._source = source
        self._statement: ast.stmt = function
        self._changes: list[Change] = []
        self._bindings = list(_iter_bindings(function))

    def collect(self) -> list[Change]:
        """Return the changes in the order of the source."""
        self._change_block(self._function.body, is_followed=False)
        return self._changes

    def _get_text(self, node: ast.expr | ast.stmt) -> str:
        return self._source.get_text(*self._source.get_range(node))

    def _add(self, operator: str, node: ast.expr | ast.stmt, text: str) -> None:
        start, end = self._source.get_range(node)
        self._changes.append(Change(operator, node, self._statement, start, end, text))

    # Statements

    def _change_block(self, body: Sequence[ast.stmt], *, is_followed: bool) -> None:
        """Change the statements of a block.

        Args:
            body: The statements.
            is_followed: Whether the function continues after the block.
        """
        last = len(body) - 1
        for index, statement in enumerate(body):
            self._statement = statement
            self._change_statement(statement, is_followed=is_followed or index < last)
            if index < last:
                self._exchange(statement, body[index + 1])

    def _change_statement(self, statement: ast.stmt, *, is_followed: bool) -> None:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return
            case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Pass():
                return
            case ast.Raise():
                self._add("drop-raise", statement, "pass")
            case ast.Continue() | ast.Break():
                self._add("drop-jump", statement, "pass")
            case ast.Return():
                self._change_return(statement, is_followed=is_followed)
            case ast.Expr(value=value):
                self._change_expression_statement(statement, value)
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
                self._change_assignment(statement)
            case ast.Delete():
                self._add("drop-statement", statement, "pass")
            case _:
                self._change_compound(statement, is_followed=is_followed)

    def _change_return(self, statement: ast.Return, *, is_followed: bool) -> None:
        if is_followed:
            self._add("drop-return", statement, "pass")
        value = statement.value
        if value is None:
            return
        if isinstance(value, ast.Compare | ast.BoolOp):
            self._add("negate-result", value, f"not ({self._get_text(value)})")
        elif not _is_empty(value):
            self._add("return-none", value, "None")
        self._change_expression(value)

    def _change_expression_statement(self, statement: ast.Expr, value: ast.expr) -> None:
        if isinstance(value, ast.Constant) or is_log_call(value):
            return
        if isinstance(value, ast.Call | ast.Await):
            self._add("drop-statement", statement, "pass")
        self._change_expression(value)

    def _change_assignment(self, statement: ast.Assign | ast.AugAssign | ast.AnnAssign) -> None:
        if statement.value is None:
            return
        if self._has_value_before(statement):
            self._add("drop-statement", statement, "pass")
        self._change_expression(statement.value)

    def _has_value_before(self, statement: ast.Assign | ast.AugAssign | ast.AnnAssign) -> bool:
        """Return whether the target of an assignment exists without it, so that its users do not just fail."""
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        names = {
            node.id
            for target in targets
            for node in ast.walk(target)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        if not names:
            return True  # an attribute or a member
        return names <= {name for name, line in self._bindings if line < statement.lineno}

    def _change_compound(self, statement: ast.stmt, *, is_followed: bool) -> None:
        match statement:
            case ast.If() if _is_type_checking(statement):
                return
            case ast.If(test=test) | ast.While(test=test):
                if statement.orelse or not all(map(_is_log_statement, statement.body)):
                    self._change_condition(test)
            case ast.For(iter=iterated) | ast.AsyncFor(iter=iterated):
                self._change_expression(iterated)
            case ast.With(items=items) | ast.AsyncWith(items=items):
                self._change_expressions([item.context_expr for item in items])
            case ast.Match(subject=subject, cases=cases):
                self._change_expression(subject)
                for case in cases:
                    self._change_condition(case.guard)
            case _:
                pass
        is_loop = isinstance(statement, ast.For | ast.AsyncFor | ast.While)
        for block in _get_blocks(statement):
            self._change_block(block, is_followed=is_followed or is_loop)

    def _exchange(self, first: ast.stmt, second: ast.stmt) -> None:
        """Exchange two statements with effects if neither uses a name that the other sets."""
        if not (_has_effect(first) and _has_effect(second)):
            return
        if not (isinstance(first, ast.Expr) or isinstance(second, ast.Expr)):
            return  # attributes can be set in any order
        if _set_names(first) & _list_names(second) or _set_names(second) & _list_names(first):
            return
        start, end_of_first = self._source.get_range(first)
        start_of_second, end = self._source.get_range(second)
        between = self._source.get_text(end_of_first, start_of_second)
        text = self._get_text(second) + between + self._get_text(first)
        self._changes.append(Change("exchange-statements", first, first, start, end, text))

    # Expressions

    def _change_condition(self, test: ast.expr | None) -> None:
        """Negate a condition, and change what it consists of."""
        if test is None:
            return
        if not _is_negation(test) and not isinstance(test, ast.Constant):
            self._add("negate-condition", test, f"not ({self._get_text(test)})")
        if isinstance(test, ast.Compare):
            self._change_comparison(test, is_condition=True)
        else:
            self._change_expression(test)

    def _change_expressions(self, expressions: Expressions) -> None:
        for each in expressions:
            self._change_expression(each)

    def _change_expression(self, node: ast.expr | None) -> None:
        if node is None or is_log_call(node):
            return
        match node:
            case ast.Constant():
                self._change_constant(node)
            case ast.Compare():
                self._change_comparison(node, is_condition=False)
            case ast.BoolOp():
                self._change_boolean(node)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._add("drop-not", node, f"({self._get_text(operand)})")
                self._change_expression(operand)
            case ast.BinOp():
                self._change_arithmetic(node)
            case ast.Call():
                self._change_call(node)
            case ast.Await(value=value):
                self._change_await(node, value)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self._change_condition(test)
                self._change_expressions([body, orelse])
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                self._change_comprehension(node)
            case ast.JoinedStr():
                return
            case _:
                self._change_expressions(
                    [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
                )

    def _change_constant(self, node: ast.Constant) -> None:
        match node.value:
            case bool(value):
                self._add("flip-boolean", node, repr(not value))
            case int(value):
                self._add("change-number", node, repr(value + 1))
                if value > 0:
                    self._add("change-number", node, repr(value - 1))
            case float(value):
                self._add("change-number", node, repr(value + 1.0))
            case str(value) if not _is_prose(value):
                self._add("change-text", node, '""' if value else '"x"')
            case _:
                return

    def _change_comparison(self, node: ast.Compare, *, is_condition: bool) -> None:
        kinds = EXCHANGED_COMPARISONS
        if not is_condition:
            kinds = kinds | OPPOSITE_COMPARISONS
        for index, kind in enumerate(map(type, node.ops)):
            if kind in kinds:
                operators = [*node.ops]
                operators[index] = kinds[kind]()
                changed = ast.Compare(node.left, operators, node.comparators)
                self._add("swap-comparison", node, ast.unparse(changed))
        self._change_expressions([node.left, *node.comparators])

    def _change_boolean(self, node: ast.BoolOp) -> None:
        opposite = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add("swap-and-or", node, f"({ast.unparse(ast.BoolOp(opposite, node.values))})")
        for index, operand in enumerate(node.values):
            others = [*node.values[:index], *node.values[index + 1 :]]
            rest = others[0] if len(others) == 1 else ast.BoolOp(node.op, others)
            self._add("drop-operand", node, f"({ast.unparse(rest)})")
            if isinstance(operand, ast.Compare):
                self._change_comparison(operand, is_condition=False)
            else:
                self._change_expression(operand)

    def _change_arithmetic(self, node: ast.BinOp) -> None:
        sides = (node.left, node.right)
        if isinstance(node.op, ast.Sub):
            changed = ast.BinOp(node.left, ast.Add(), node.right)
            self._add("swap-plus-minus", node, f"({ast.unparse(changed)})")
        elif isinstance(node.op, ast.Add) and any(map(_is_number, sides)):
            changed = ast.BinOp(node.left, ast.Sub(), node.right)
            self._add("swap-plus-minus", node, f"({ast.unparse(changed)})")
        self._change_expressions(sides)

    def _change_call(self, node: ast.Call) -> None:
        function = node.func
        arguments: list[ast.expr] = list(node.args)
        match function:
            case ast.Name(id="cast"):
                arguments = arguments[1:]
            case ast.Name(id="isinstance" | "issubclass"):
                arguments = arguments[:1]
            case ast.Name(id=name) if name in EXCHANGED_FUNCTIONS:
                self._add("swap-function", function, EXCHANGED_FUNCTIONS[name])
            case _:
                self._change_expression(function)
        self._change_expressions(arguments)
        self._change_expressions(
            [each.value for each in node.keywords if each.arg not in UNTESTED_KEYWORDS]
        )

    def _change_await(self, node: ast.Await, value: ast.expr) -> None:
        if isinstance(value, ast.Call) and value.args and _get_name(value.func) == "shield":
            self._add("drop-shield", node, f"await {self._get_text(value.args[0])}")
        self._change_expression(value)

    def _change_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
    ) -> None:
        if isinstance(node, ast.DictComp):
            self._change_expressions([node.key, node.value])
        else:
            self._change_expression(node.elt)
        for generator in node.generators:
            self._change_expression(generator.iter)
            for condition in generator.ifs:
                self._change_condition(condition)


def _iter_bindings(function: Function) -> Iterator[tuple[str, int]]:
    """Yield the names that a function, or one that contains it, sets, each with its line."""
    for node in ast.walk(function):
        match node:
            case ast.arg(arg=name, lineno=line):
                yield name, line
            case ast.Name(id=name, ctx=ast.Store(), lineno=line):
                yield name, line
            case ast.Nonlocal(names=names) | ast.Global(names=names):
                yield from ((name, 0) for name in names)
            case _:
                pass


def _is_negation(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)


def _is_empty(node: ast.expr) -> bool:
    """Return whether a value is false, so that ``None`` in its place is seldom another decision."""
    match node:
        case ast.Constant(value=value):
            return not value
        case ast.Tuple(elts=members) | ast.List(elts=members):
            return not members
        case ast.Dict(keys=keys):
            return not keys
        case _:
            return False


def _is_prose(text: str) -> bool:
    """Return whether a text is for readers, or SQL."""
    return " " in text.strip()


def _is_number(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=int() | float()):
            return True
        case ast.Call(func=ast.Name(id="len")):
            return True
        case _:
            return False


def _has_effect(statement: ast.stmt) -> bool:
    """Return whether a statement calls something, or sets an attribute or a member."""
    match statement:
        case ast.Expr(value=ast.Call() | ast.Await() as value):
            return not is_log_call(value)
        case ast.Assign(targets=targets):
            return all(isinstance(each, ast.Attribute | ast.Subscript) for each in targets)
        case ast.AugAssign(target=target):
            return isinstance(target, ast.Attribute | ast.Subscript)
        case _:
            return False


def _iter_targets(statement: ast.stmt) -> Iterator[ast.expr]:
    match statement:
        case ast.Assign(targets=targets):
            yield from targets
        case ast.AugAssign(target=target):
            yield target
        case _:
            return


def _set_names(statement: ast.stmt) -> set[str]:
    """Return the attributes and members that a statement sets."""
    return {ast.unparse(target) for target in _iter_targets(statement)}


def _list_names(statement: ast.stmt) -> set[str]:
    """Return the names, attributes and members that a statement uses or sets."""
    kinds = ast.Name | ast.Attribute | ast.Subscript
    return {ast.unparse(node) for node in ast.walk(statement) if isinstance(node, kinds)}
