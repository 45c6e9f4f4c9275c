"""Rules for texts: echo one, write at length, count, refuse; quote, count and search messages, recall facts; do sums.

"Earlier" never includes the question itself, so a server that has lost the context is detected
by the first question about the past.

Arithmetic is exact and bounded, without ``eval``. A sentence is an expression if it consists of numbers, operators and
parentheses after its opening words are removed and words for operators are replaced. Values are fractions, so 0.1 + 0.2
is 0.3; a number of more than ``MAX_BITS`` bits stops the evaluation.
"""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from itertools import cycle, islice

from kedge.server.practice_model import context
from kedge.server.practice_model.context import TextResult, Utterance, quote_text

MAX_TIMES = 1_000
MAX_WORDS = 100_000
MAX_REPEAT_LENGTH = 2_000
TIMES_PATTERN = re.compile(
    r"\A(.*?)[\s,]+(?:(\d{1,6}) times|(twice)|(thrice|three times))\W*\Z", re.DOTALL | re.IGNORECASE
)
QUOTE_PAIRS = {'"': '"', "“": "”", "'": "'"}

LITERAL_RULES = context.RuleList()
OTHER_RULES = context.RuleList()

FILLER_TEXT = (
    "The kedge goes out, the line comes tight, and the ship moves a little way ahead again."
)


@LITERAL_RULES.prefix("say something", r"(?:say|repeat|echo)\s+(?P<text>[\"“'].+)")
@LITERAL_RULES.prefix("say something", r"(?:say|repeat|echo|repeat after me)\s*:\s*(?P<text>.+)")
def echo(_: Utterance, match: re.Match[str]) -> TextResult | None:
    """Repeat the rest of the sentence, as often as requested."""
    text = match["text"].strip()
    if not text:
        return None
    if len(text) < MAX_REPEAT_LENGTH and (times := TIMES_PATTERN.match(text)):
        number = int(times[2]) if times[2] else 2 if times[3] else 3
        once = strip_quotes(times[1].rstrip(":, "))
        return TextResult(" ".join([once] * min(number, MAX_TIMES)), once)
    return TextResult(strip_quotes(text), strip_quotes(text))


def strip_quotes(text: str) -> str:
    """Remove a pair of quotation marks around the text."""
    for end in ("", ".", "!", "?"):
        body = text.removesuffix(end)
        if len(body) > 1 and QUOTE_PAIRS.get(body[0]) == body[-1] and body.count(body[-1]) <= 2:
            return body[1:-1]
    return text


@LITERAL_RULES.prefix("write at length", r"write\s+(\d{1,9})\s+words?\b")
def write_words(_: Utterance, match: re.Match[str]) -> TextResult:
    """Write the requested number of words."""
    number = min(int(match[1]), MAX_WORDS)
    return TextResult(" ".join(islice(cycle(FILLER_TEXT.split()), number)))


@LITERAL_RULES.prefix("count to a number", r"count\s+(?:from 1\s+)?to\s+(\d{1,9})\b")
def count_to(_: Utterance, match: re.Match[str]) -> TextResult:
    """Count from one to a number."""
    number = min(int(match[1]), MAX_WORDS)
    return TextResult(" ".join(map(str, range(1, number + 1))), list(range(1, number + 1)))


@LITERAL_RULES.prefix("refuse", r"refuse\b(?:\s+to\b)?[\s:,]*(?P<what>.*)")
def refuse(_: Utterance, match: re.Match[str]) -> TextResult:
    """Refuse a request, and name it in the refusal."""
    what = match["what"].strip().rstrip(".!?")
    return TextResult(f"I will not {what}." if what else "I will not do that.", is_refusal=True)


ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth",
            "tenth")  # fmt: skip
ORDINAL_PATTERN = rf"{'|'.join(ORDINALS)}|\d{{1,6}}(?:st|nd|rd|th)|last|previous|latest"
SPEECH_VERBS = (
    r"(?:say|said|write|written|ask|asked|answer|answered|reply|replied|tell you|told you)"
)
USER, MODEL = (("user",), "You", " of yours"), (("assistant",), "I", " of mine")
SPEAKERS = {"i": USER, "my": USER, "you": MODEL, "your": MODEL}
"""The messages that a pronoun refers to: their roles, the subject of a quote, and the suffix of a count."""
ANY_SPEAKER = ("user", "assistant"), "", ""
FACT_PATTERN = re.compile(r"\bmy ([\w' -]{1,60}?) (?:is|are) ([^.!?\n]{1,200})", re.IGNORECASE)


def earlier_texts(utterance: Utterance, *roles: str) -> list[str]:
    """Return the texts of the messages of these roles, without the newest user message."""
    items = utterance.request.items
    newer = context.items_after_last_user(items)
    older = items[: max(len(items) - len(newer) - 1, 0)]
    return context.message_texts([*older, *newer], *roles)


@OTHER_RULES.prefix(
    "list the messages",
    r"(?:repeat|list) (?:everything|all|all the messages|the messages)"
    r"(?: (?:that )?(?P<whose>i|you|we)(?: have)? said)?(?: so far)?\W*\Z",
)
@OTHER_RULES.search(
    "list the messages",
    rf"\bwhat (?:did|have) (?P<whose>i|you|we) {SPEECH_VERBS} (?:so far|until now|in all|altogether)",
)
def list_messages(utterance: Utterance, match: re.Match[str]) -> TextResult:
    """List the messages so far, with numbers."""
    roles, *_ = SPEAKERS.get(context.fold_case(match["whose"] or ""), ANY_SPEAKER)
    texts = earlier_texts(utterance, *roles)
    if not texts:
        return TextResult("Nothing has been said before this message.", [])
    return TextResult("\n".join(f"{i}. {text}" for i, text in enumerate(texts, 1)), texts)


@OTHER_RULES.search(
    "quote a message",
    r"\b(?:what (?:was|is)|quote|repeat) (?P<whose>my|your|the) "
    rf"(?P<which>{ORDINAL_PATTERN}) (?:message|question|answer|sentence|thing)\b",
)
@OTHER_RULES.search(
    "quote a message",
    rf"\bwhat (?:did|have) (?P<whose>i|you) (?:just )?{SPEECH_VERBS}\b(?P<which>[^?.!]*)",
)
def quote_message(utterance: Utterance, match: re.Match[str]) -> TextResult:
    """Quote one message: the first, the last, the n-th, of the user or of the model."""
    roles, subject, owner = SPEAKERS.get(context.fold_case(match["whose"]), ANY_SPEAKER)
    ordinal = re.search(rf"\b({ORDINAL_PATTERN})\b", match["which"] or "", re.IGNORECASE)
    which = context.fold_case(ordinal[1]) if ordinal else "last"
    texts = earlier_texts(utterance, *roles)
    position = _find_index(which, len(texts))
    if not 0 <= position < len(texts):
        number = f"only {context.format_count(len(texts), 'message')}" if texts else "no message"
        return TextResult(f"I cannot see it: there is {number}{owner} before this one.")
    text = texts[position]
    start = f"{subject} said {which}" if subject else f"The {which} message is"
    return TextResult(f"{start}: {quote_text(text)}", text)


def _find_index(which: str, count: int) -> int:
    if which in ORDINALS:
        return ORDINALS.index(which)
    if which[0].isdigit():
        return int(which[:-2]) - 1
    return count - 1


# The counted groups of messages, in the order of the report.
COUNTED_ROLES = (
    ("of yours", ("user",)),
    ("of mine", ("assistant",)),
    ("of the system", ("system", "developer")),
)


@OTHER_RULES.search("count the messages", r"\b(?:how many|count (?:the|my|our|all)) messages\b")
def count_messages(utterance: Utterance, _: re.Match[str]) -> TextResult:
    """Count the messages and, if there are any, the tool results and reasoning items."""
    items = utterance.request.items
    counts = [
        (sum(context.is_message(item, *roles) for item in items), owner)
        for owner, roles in COUNTED_ROLES
    ]
    total = sum(number for number, _ in counts)
    shares = ", ".join(f"{number} {owner}" for number, owner in counts if number)
    others = {
        "tool result": sum(map(context.is_output, items)),
        "thought": sum(item.get("type") == "reasoning" for item in items),
    }
    more = [context.format_count(number, noun) for noun, number in others.items() if number]
    also = f" Also {' and '.join(more)}." if more else ""
    return TextResult(f"I can see {context.format_count(total, 'message')}: {shares}.{also}", total)


@OTHER_RULES.search(
    "quote the instructions", r"\b(?:what (?:are|were)|repeat|quote) your instructions\b"
)
def quote_instructions(utterance: Utterance, _: re.Match[str]) -> TextResult:
    """Quote the instructions of this request and the system texts of the context."""
    system = context.message_texts(utterance.request.items, "system", "developer")
    texts = [text for text in (utterance.request.instructions, *system) if text]
    if not texts:
        return TextResult("I have no instructions.")
    quoted = " ".join(map(quote_text, texts))
    return TextResult(f"My instructions are: {quoted}", "\n".join(texts))


@OTHER_RULES.search(
    "quote a tool result",
    r"\bwhat (?:did (?:the|your|that)(?: last)? tool (?:say|answer|return)"
    r"|was the(?: last)? tool (?:result|output))\b",
)
def quote_last_result(utterance: Utterance, _: re.Match[str]) -> TextResult:
    """Quote the newest tool result of the context."""
    results = context.tool_results(utterance.request.items)
    if not results:
        return TextResult("I can see no tool result.")
    name, output = results[-1]
    return TextResult(f"{name} said last: {quote_text(output)}", output)


@OTHER_RULES.search("quote a thought", r"\bwhat did you (?:just )?think\b")
def quote_last_reasoning(utterance: Utterance, _: re.Match[str]) -> TextResult:
    """Quote the newest reasoning item."""
    entries = [item for item in utterance.request.items if item.get("type") == "reasoning"]
    if not entries:
        return TextResult("I can see no thought of mine.")
    text = context.extract_text(entries[-1].get("content")) or context.extract_text(
        entries[-1].get("summary")
    )
    text = text or utterance.request.read_reasoning(entries[-1])
    return TextResult(
        f"I thought: {quote_text(text)}" if text else "My last thought is sealed.", text
    )


@OTHER_RULES.search("recall a fact", r"\bwhat (?:is|are) my ([\w' -]{1,60}?)\s*\??\s*\Z")
def recall_fact(utterance: Utterance, match: re.Match[str]) -> TextResult | None:
    """Answer "What is my …?" from "My … is …", the newest statement first."""
    wanted = _normalize(match[1])
    for text in reversed(earlier_texts(utterance, "user")):
        for name, value in reversed(FACT_PATTERN.findall(text)):
            if _normalize(name) == wanted:
                verb = "are" if match[0].lower().split()[1] == "are" else "is"
                return TextResult(f"Your {name.strip()} {verb} {value.strip()}.", value.strip())
    return TextResult(f"You have not told me your {match[1].strip()}.")


def _normalize(text: str) -> str:
    return " ".join(text.lower().split())


@OTHER_RULES.search(
    "search the messages",
    r"\b(?:do you remember|did i (?:mention|say anything about|tell you about))\b(.{1,200})",
)
def search_messages(utterance: Utterance, match: re.Match[str]) -> TextResult:
    """Search the earlier messages for a text."""
    wanted = match[1].strip().strip("\"'“”").rstrip("?.! ")
    for i, text in enumerate(
        earlier_texts(utterance, "user", "assistant", "system", "developer"), 1
    ):
        if wanted and wanted.lower() in text.lower():
            return TextResult(f"Yes, in message {i}: {quote_text(text)}", True)
    return TextResult(f"No, I can see nothing about {quote_text(wanted)}.", False)


MAX_LENGTH = 200
MAX_BITS = 2_048
PRECISION = 12

WORD_OPERATORS = (
    (r"(?<=\d),(?=\d{3}\b)", ""),
    (r"\bplus\b", "+"),
    (r"\bminus\b", "-"),
    (r"\b(?:times|multiplied by)\b|[\u00d7\u00b7]|(?<=\d)\s*x\s*(?=\d)", "*"),
    (r"\b(?:divided by|over)\b|÷", "/"),
    (r"\b(?:to the power of)\b|\^", "**"),
    (r"\bmod(?:ulo)?\b", "%"),
    (r"%\s+of\b", "/ 100 *"),
    (r"\bsquared\b", "** 2"),
    (r"\u2212", "-"),
)
ALLOWED_CHARS = re.compile(r"[\d\s.+*/%()-]+")
LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")


class NumberTooLarge(ArithmeticError):
    """A number of the expression is out of bounds."""


@OTHER_RULES.prefix(
    "do a sum",
    r"(?:what(?:'s| is)|how much is|calculate|compute|work out|evaluate)?\s*"
    rf"(?!.{{{MAX_LENGTH}}})(?P<sum>[-(.\d][^?=]*?)[\s?=.!]*\Z",
)
def calculate(_: Utterance, match: re.Match[str]) -> TextResult | None:
    """Evaluate an expression and return a text with the expression and its value."""
    expression = match["sum"].strip()
    try:
        value = evaluate(expression)
    except ZeroDivisionError:
        return TextResult("Nothing can be divided by zero.")
    except NumberTooLarge:
        return TextResult("That number is too big for me.")
    if value is None:
        return None
    exact, text = format_fraction(value)
    number = int(value) if value.denominator == 1 else float(value)
    return TextResult(f"{expression} {'=' if exact else 'is about'} {text}.", number)


def evaluate(text: str) -> Fraction | None:
    """Evaluate an expression; None if the text is not one."""
    if len(text) > MAX_LENGTH:
        return None
    for words, sign in WORD_OPERATORS:
        text = re.sub(words, sign, text, flags=re.IGNORECASE)
    text = LEADING_ZEROS.sub("", text.strip())
    if not ALLOWED_CHARS.fullmatch(text):
        return None
    try:
        # Parsed as Python, which has the same precedence, and never executed.
        tree = ast.parse(text, mode="eval").body
        is_sum = any(isinstance(node, ast.BinOp) for node in ast.walk(tree))
        return _evaluate_node(tree, text) if is_sum else None
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def format_fraction(value: Fraction) -> tuple[bool, str]:
    """Format a number in decimals; also return whether that is exact."""
    if value.denominator == 1:
        return True, str(value.numerator)
    rounded = Context(prec=PRECISION).divide(Decimal(value.numerator), Decimal(value.denominator))
    return Fraction(rounded) == value, f"{rounded.normalize():f}"


def _evaluate_node(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant():
            return _check_bounds(Fraction(ast.get_source_segment(text, node) or ""))
        case ast.UnaryOp(ast.UAdd() | ast.USub() as sign, operand):
            value = _evaluate_node(operand, text)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            values = _evaluate_node(left, text), _evaluate_node(right, text)
            return _check_bounds(OPERATORS[type(sign)](*values))
        case _:
            raise ValueError("not arithmetic")


def _compute_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ValueError("a root has no exact value")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent) > MAX_BITS:
        raise NumberTooLarge
    if base == 0 and exponent < 0:
        raise ZeroDivisionError
    return base ** int(exponent)


OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left / right,
    ast.Mod: operator.mod,
    ast.Pow: _compute_power,
}


def _check_bounds(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NumberTooLarge
    return value


OTHER_RULES.prefix("say something", r"(?:say|repeat|echo)\s+(?P<text>.+)")(echo)
