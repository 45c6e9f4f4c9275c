r"""Regular expressions of schemas: a text that fits one, and whether a text does.

Covers what schemas use: literals, escapes, classes, groups, alternatives, repetition, anchors; what
it cannot read (look-around, back references) raises ``Unreadable``. The pattern comes with a request,
so it is never given to ``re``, where a spiteful one runs for ever: matching here follows all the
positions that a text can be at, at once, and takes time in proportion to pattern and text.
"""

from collections.abc import Callable
from dataclasses import dataclass

MOST = 1_000
DEEPEST = 30
WORD = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
SPACE = " \t\n\r\f\v"
ESCAPES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "d": ("0", lambda char: char in "0123456789"),
    "D": ("a", lambda char: char not in "0123456789"),
    "w": ("a", lambda char: char in WORD),
    "W": ("-", lambda char: char not in WORD),
    "s": (" ", lambda char: char in SPACE),
    "S": ("a", lambda char: char not in SPACE),
}
CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
RARELY_EXCLUDED = "aA0_-. ~é"


class Unreadable(ValueError):
    """The pattern uses something that this reader does not know."""


@dataclass(frozen=True, slots=True)
class Char:
    """One character: an example, and the test for others."""

    example: str
    fits: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Edge:
    """The start or the end of the text."""

    end: bool


@dataclass(frozen=True, slots=True)
class Row:
    """Parts one after the other."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Either:
    """One of several."""

    options: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part several times."""

    part: "Node"
    least: int
    most: int


Node = Char | Edge | Row | Either | Repeat


def example(pattern: str) -> str:
    """Make a text that fits: first alternatives, least repetitions."""
    return _example(_Reader(pattern).read())


def fits(pattern: str, text: str) -> bool:
    """Whether the pattern is found in the text."""
    return bool(_ends(_Reader(pattern).read(), text, set(range(len(text) + 1))))


def _example(node: Node) -> str:
    match node:
        case Char():
            return node.example
        case Edge():
            return ""
        case Row():
            text = "".join(map(_example, node.parts))
        case Either():
            text = _example(node.options[0])
        case Repeat():
            text = _example(node.part) * node.least
    if len(text) > MOST:
        raise Unreadable
    return text


def _ends(node: Node, text: str, starts: set[int]) -> set[int]:
    """Where the node can end, having started at any of these places."""
    match node:
        case Char():
            return {at + 1 for at in starts if at < len(text) and node.fits(text[at])}
        case Edge():
            return starts & {len(text) if node.end else 0}
        case Row():
            for part in node.parts:
                starts = _ends(part, text, starts)
            return starts
        case Either():
            return set[int]().union(*(_ends(option, text, starts) for option in node.options))
        case Repeat():
            return _repeated(node, text, starts)


def _repeated(node: Repeat, text: str, starts: set[int]) -> set[int]:
    for _ in range(node.least):
        starts = _ends(node.part, text, starts)
    found, fresh = set(starts), starts
    for _ in range(node.most - node.least):
        fresh = _ends(node.part, text, fresh) - found
        if not fresh:
            break
        found |= fresh
    return found


class _Reader:
    """Reads a pattern into nodes, from left to right."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MOST:
            raise Unreadable
        self.pattern = pattern
        self.at = 0
        self.depth = 0

    def read(self) -> Node:
        node = self.either()
        if self.at < len(self.pattern):
            raise Unreadable
        return node

    def peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def next(self) -> str:
        if self.at >= len(self.pattern):
            raise Unreadable
        self.at += 1
        return self.pattern[self.at - 1]

    def took(self, char: str) -> bool:
        if self.peek() != char:
            return False
        self.at += 1
        return True

    def either(self) -> Node:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable
        options = [self.row()]
        while self.took("|"):
            options.append(self.row())
        self.depth -= 1
        return Either(tuple(options))

    def row(self) -> Node:
        parts: list[Node] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.repeated(self.atom()))
        return Row(tuple(parts))

    def atom(self) -> Node:
        match char := self.next():
            case "^" | "$":
                return Edge(end=char == "$")
            case ".":
                return Char("a", lambda char: char != "\n")
            case "(":
                return self.group()
            case "[":
                return self.members()
            case "\\":
                return self.escape()
            case "*" | "+" | "?" | "{":
                raise Unreadable
            case _:
                return Char(char, char.__eq__)

    def group(self) -> Node:
        if self.took("?") and not self.took(":"):
            raise Unreadable
        inner = self.either()
        if not self.took(")"):
            raise Unreadable
        return inner

    def members(self) -> Char:
        negated = self.took("^")
        members: list[Char] = []
        while not members or self.peek() != "]":
            first = self.member()
            if self.peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self.next()
                first = _span(first.example, self.member().example)
            members.append(first)
        self.next()
        if not negated:
            return Char(members[0].example, lambda char: any(each.fits(char) for each in members))
        free = [char for char in RARELY_EXCLUDED if not any(each.fits(char) for each in members)]
        if not free:
            raise Unreadable
        return Char(free[0], lambda char: not any(each.fits(char) for each in members))

    def member(self) -> Char:
        char = self.next()
        return self.escape() if char == "\\" else Char(char, char.__eq__)

    def escape(self) -> Char:
        char = self.next()
        if char in ESCAPES:
            return Char(*ESCAPES[char])
        if char in CONTROLS:
            return Char(CONTROLS[char], CONTROLS[char].__eq__)
        if char.isalnum():
            raise Unreadable
        return Char(char, char.__eq__)

    def repeated(self, node: Node) -> Node:
        if self.took("*"):
            least, most = 0, MOST
        elif self.took("+"):
            least, most = 1, MOST
        elif self.took("?"):
            least, most = 0, 1
        elif self.took("{"):
            least, most = self.bounds()
        else:
            return node
        self.took("?")  # lazy: the same texts
        return Repeat(node, least, most)

    def bounds(self) -> tuple[int, int]:
        inside, closed, _ = self.pattern[self.at :].partition("}")
        low, comma, high = inside.partition(",")
        high = (high or str(MOST)) if comma else low
        if not closed or not low.isdecimal() or not high.isdecimal() or int(low) > MOST:
            raise Unreadable
        self.at += len(inside) + 1
        return int(low), min(int(high), MOST)


def _span(low: str, high: str) -> Char:
    return Char(low, lambda char: low <= char <= high)
