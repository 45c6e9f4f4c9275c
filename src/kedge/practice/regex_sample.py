r"""Regular expressions of schemas: a text that fits one, and whether a text does.

Covers what schemas use: literals, escapes, classes, groups, alternatives, repetition, anchors; what
it cannot read (look-around, back references) raises ``Unreadable``. The pattern comes with a request,
so it is never given to ``re``, where a spiteful one runs for ever: matching here follows all the
positions that a text can be at, at once, and takes time in proportion to pattern and text.
"""

from collections.abc import Callable
from dataclasses import dataclass

MAX_SIZE = 1_000
MAX_DEPTH = 30
WORD_CHARS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
SPACE_CHARS = " \t\n\r\f\v"
CLASS_ESCAPES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "d": ("0", lambda char: char in "0123456789"),
    "D": ("a", lambda char: char not in "0123456789"),
    "w": ("a", lambda char: char in WORD_CHARS),
    "W": ("-", lambda char: char not in WORD_CHARS),
    "s": (" ", lambda char: char in SPACE_CHARS),
    "S": ("a", lambda char: char not in SPACE_CHARS),
}
CONTROL_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
NEGATED_EXAMPLES = "aA0_-. ~é"


class UnsupportedPattern(ValueError):
    """The pattern uses something that this reader does not know."""


@dataclass(frozen=True, slots=True)
class RegexChar:
    """One character: an example, and the test for others."""

    example: str
    accepts: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class RegexBoundary:
    """The start or the end of the text."""

    is_end: bool


@dataclass(frozen=True, slots=True)
class RegexSequence:
    """Parts one after the other."""

    parts: "tuple[RegexNode, ...]"


@dataclass(frozen=True, slots=True)
class RegexAlternation:
    """One of several."""

    options: "tuple[RegexNode, ...]"


@dataclass(frozen=True, slots=True)
class RegexRepeat:
    """A part several times."""

    part: "RegexNode"
    minimum: int
    maximum: int


RegexNode = RegexChar | RegexBoundary | RegexSequence | RegexAlternation | RegexRepeat


def sample_match(pattern: str) -> str:
    """Make a text that fits: first alternatives, least repetitions."""
    return _sample_node(_PatternParser(pattern).parse())


def pattern_matches(pattern: str, text: str) -> bool:
    """Whether the pattern is found in the text."""
    return bool(_find_ends(_PatternParser(pattern).parse(), text, set(range(len(text) + 1))))


def _sample_node(node: RegexNode) -> str:
    match node:
        case RegexChar():
            return node.example
        case RegexBoundary():
            return ""
        case RegexSequence():
            text = "".join(map(_sample_node, node.parts))
        case RegexAlternation():
            text = _sample_node(node.options[0])
        case RegexRepeat():
            text = _sample_node(node.part) * node.minimum
    if len(text) > MAX_SIZE:
        raise UnsupportedPattern
    return text


def _find_ends(node: RegexNode, text: str, starts: set[int]) -> set[int]:
    """Where the node can end, having started at any of these places."""
    match node:
        case RegexChar():
            return {at + 1 for at in starts if at < len(text) and node.accepts(text[at])}
        case RegexBoundary():
            return starts & {len(text) if node.is_end else 0}
        case RegexSequence():
            for part in node.parts:
                starts = _find_ends(part, text, starts)
            return starts
        case RegexAlternation():
            return set[int]().union(*(_find_ends(option, text, starts) for option in node.options))
        case RegexRepeat():
            return _find_repeat_ends(node, text, starts)


def _find_repeat_ends(node: RegexRepeat, text: str, starts: set[int]) -> set[int]:
    for _ in range(node.minimum):
        starts = _find_ends(node.part, text, starts)
    found, fresh = set(starts), starts
    for _ in range(node.maximum - node.minimum):
        fresh = _find_ends(node.part, text, fresh) - found
        if not fresh:
            break
        found |= fresh
    return found


class _PatternParser:
    """Reads a pattern into nodes, from left to right."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_SIZE:
            raise UnsupportedPattern
        self.pattern = pattern
        self.position = 0
        self.depth = 0

    def parse(self) -> RegexNode:
        node = self.parse_alternation()
        if self.position < len(self.pattern):
            raise UnsupportedPattern
        return node

    def peek(self) -> str:
        return self.pattern[self.position : self.position + 1]

    def next(self) -> str:
        if self.position >= len(self.pattern):
            raise UnsupportedPattern
        self.position += 1
        return self.pattern[self.position - 1]

    def accept(self, char: str) -> bool:
        if self.peek() != char:
            return False
        self.position += 1
        return True

    def parse_alternation(self) -> RegexNode:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnsupportedPattern
        options = [self.parse_sequence()]
        while self.accept("|"):
            options.append(self.parse_sequence())
        self.depth -= 1
        return RegexAlternation(tuple(options))

    def parse_sequence(self) -> RegexNode:
        parts: list[RegexNode] = []
        while self.peek() not in ("", "|", ")"):
            parts.append(self.parse_quantifier(self.parse_atom()))
        return RegexSequence(tuple(parts))

    def parse_atom(self) -> RegexNode:
        match char := self.next():
            case "^" | "$":
                return RegexBoundary(is_end=char == "$")
            case ".":
                return RegexChar("a", lambda char: char != "\n")
            case "(":
                return self.parse_group()
            case "[":
                return self.parse_class()
            case "\\":
                return self.parse_escape()
            case "*" | "+" | "?" | "{":
                raise UnsupportedPattern
            case _:
                return RegexChar(char, char.__eq__)

    def parse_group(self) -> RegexNode:
        if self.accept("?") and not self.accept(":"):
            raise UnsupportedPattern
        inner = self.parse_alternation()
        if not self.accept(")"):
            raise UnsupportedPattern
        return inner

    def parse_class(self) -> RegexChar:
        negated = self.accept("^")
        members: list[RegexChar] = []
        while not members or self.peek() != "]":
            first = self.parse_class_member()
            if self.peek() == "-" and self.pattern[self.position + 1 : self.position + 2] not in (
                "]",
                "",
            ):
                self.next()
                first = _char_range(first.example, self.parse_class_member().example)
            members.append(first)
        self.next()
        if not negated:
            return RegexChar(
                members[0].example, lambda char: any(each.accepts(char) for each in members)
            )
        free = [
            char for char in NEGATED_EXAMPLES if not any(each.accepts(char) for each in members)
        ]
        if not free:
            raise UnsupportedPattern
        return RegexChar(free[0], lambda char: not any(each.accepts(char) for each in members))

    def parse_class_member(self) -> RegexChar:
        char = self.next()
        return self.parse_escape() if char == "\\" else RegexChar(char, char.__eq__)

    def parse_escape(self) -> RegexChar:
        char = self.next()
        if char in CLASS_ESCAPES:
            return RegexChar(*CLASS_ESCAPES[char])
        if char in CONTROL_ESCAPES:
            return RegexChar(CONTROL_ESCAPES[char], CONTROL_ESCAPES[char].__eq__)
        if char.isalnum():
            raise UnsupportedPattern
        return RegexChar(char, char.__eq__)

    def parse_quantifier(self, node: RegexNode) -> RegexNode:
        if self.accept("*"):
            least, most = 0, MAX_SIZE
        elif self.accept("+"):
            least, most = 1, MAX_SIZE
        elif self.accept("?"):
            least, most = 0, 1
        elif self.accept("{"):
            least, most = self.parse_bounds()
        else:
            return node
        self.accept("?")  # lazy: the same texts
        return RegexRepeat(node, least, most)

    def parse_bounds(self) -> tuple[int, int]:
        inside, closed, _ = self.pattern[self.position :].partition("}")
        low, comma, high = inside.partition(",")
        high = (high or str(MAX_SIZE)) if comma else low
        if not closed or not low.isdecimal() or not high.isdecimal() or int(low) > MAX_SIZE:
            raise UnsupportedPattern
        self.position += len(inside) + 1
        return int(low), min(int(high), MAX_SIZE)


def _char_range(low: str, high: str) -> RegexChar:
    return RegexChar(low, lambda char: low <= char <= high)
