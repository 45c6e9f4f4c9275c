"""The practice model itself: from what was asked to an answer.

Results of tools come first, then what ``tool_choice`` forces, then the rules in the order of
``RULES``: the first that has an answer gives it. What no rule knows is said back, with the number
of messages in sight, so that even small talk shows what is remembered.
"""

from kedge.practice import calls, echo, memory, sums
from kedge.practice.context import is_own, last_said, message_count
from kedge.practice.formats import formatted
from kedge.practice.modifiers import manner_of
from kedge.practice.rule import Heard, Rule, Said, first_match, opening, plural, quoted
from kedge.practice.values import Ask, Call, Part, Refuse, Reply, Say, Think

QUOTED_MOST = 200
EFFORTS_WITHOUT_THOUGHT = (None, "none", "minimal")
HELP = (
    'Try: "What did I say first?", "How many messages can you see?", "What is 2 + 3 * 4?", '
    '"Say hello 3 times", "Think about 6 * 7", "Write 100 words", "Count to 10, slowly", '
    '"Refuse to sing", or ask for one of your tools by its name.'
)

RULES: tuple[Rule, ...] = (
    *echo.LITERAL,
    *calls.RULES,
    *memory.RULES,
    *sums.RULES,
    *echo.LOOSE,
    opening(
        "give help", ("help", "what can"), r"(?:help|what can you do)\b", lambda _, __: Said(HELP)
    ),
    *calls.IMPLIED,
)


def answer(ask: Ask) -> Reply:
    """Answer one request: pure, deterministic, instant."""
    heard = heard_in(ask)
    said, why = respond(heard)
    parts: list[Part] = [Think(_thought(heard, why))] if _thinks(heard) else []
    if isinstance(said, Said):
        text = formatted(heard, said) if not said.refused else said.text
        parts.append(Refuse(_writable(text)) if said.refused else Say(_writable(text)))
    else:
        parts += [Call(each.name, _writable(each.arguments), each.custom) for each in said]
    return Reply(tuple(parts), heard.pace)


def heard_in(ask: Ask) -> Heard:
    """Read the newest user message and the manner in which it wants its answer."""
    message = last_said(ask.items)
    manner = manner_of(message)
    return Heard(ask, message, manner.sentence, manner.pace, manner.think)


def respond(heard: Heard) -> tuple[Said | tuple[Call, ...], str]:
    """Find what to say or to call, and what that is about."""
    if calls.must_call(heard.ask) and (due := calls.forced(heard)):
        return due, "call a tool, as I must"
    if (told := calls.report(heard)) is not None:
        due = calls.asked(heard)
        return (due, "make the next call") if due else (told, "use the results")
    if heard.ask.items and is_own(heard.ask.items[-1]):
        return _nothing_new(heard.ask), "wait for something new"
    return first_match(RULES, heard) or (_said_back(heard), "say it back")


def _said_back(heard: Heard) -> Said:
    if not heard.message:
        return Said(f"You have said nothing. {_seen(heard.ask)}")
    return Said(f"You said: {quoted(heard.message, QUOTED_MOST)} ({_seen(heard.ask)})")


def _nothing_new(ask: Ask) -> Said:
    return Said(f"You have said nothing new. {_seen(ask)}")


def _seen(ask: Ask) -> str:
    return f"I can see {plural(message_count(ask.items), 'message')}."


def _thinks(heard: Heard) -> bool:
    effort = (heard.ask.reasoning or {}).get("effort")
    return heard.think or effort not in EFFORTS_WITHOUT_THOUGHT


def _thought(heard: Heard, about: str) -> str:
    newest = quoted(heard.message, QUOTED_MOST)
    return f"{_seen(heard.ask)} The newest from the user is {newest}. So I {about}."


def _writable(text: str) -> str:
    """Replace what no encoding can write: surrogates without their other half."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
