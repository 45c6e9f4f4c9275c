"""The whole error tree. Every error that Kedge raises on purpose is a ``KedgeError``.

    KedgeError
    ├── Blocked              a guard stopped the Turn; ``rule`` names which
    ├── CannotConnect        a model string, a key or a server is missing
    │   └── UnconfirmedReference stored data names an address or a function not confirmed here
    ├── CannotServe          the server cannot start as asked
    ├── EngineError          a request failed; carries provider, plan, request id, turn, retryable
    │   ├── AnswerIncomplete     the answer stopped before its end, for a reason the server names
    │   ├── RequestRefused       the server will not take the request (4xx)
    │   │   ├── ChainRefused         ... because it has no memory of the response it is based on
    │   │   │   └── ResendTooLong        ... and sending everything is more than was allowed
    │   │   ├── NotAuthorised        ... because of the key
    │   │   └── RateLimited          ... for now; ``retry_after`` says how long
    │   ├── ServerFailed         the server failed (5xx), or gave up on the response
    │   ├── StreamCut            the stream ended before the answer did
    │   ├── StreamTooLarge       a stream holds a line or a message beyond its bound
    │   └── Unreachable          no connection, or no answer in time
    ├── InvalidTurn          a Turn that cannot be: two blocks with one id, an unknown block id
    │   └── InvalidJSON      malformed JSON form; ``path`` names the offending member
    ├── InvalidFault         a fault of the server that cannot be
    ├── BrokenInstallation   a file of the package itself is damaged
    ├── InvalidScript        a script of the practice model is wrong; ``place`` says where
    ├── InvalidSetting       a setting that cannot be: a limit below one, a key that is none
    ├── StoreError           the store cannot do what was asked; ``retryable`` tells if it may later
    │   ├── CannotOpenStore      a wrong address or password, no database of ours, or a newer one
    │   ├── HeadConflict         somebody else moved the head first; both branches are kept
    │   ├── KeyReused            an idempotency key came back with another message
    │   ├── NotInStore           no such conversation, node or block
    │   ├── StoreBusy            others hold it for too long: a lock, or every connection
    │   ├── StoreDamaged         what is stored is not what was written
    │   ├── StoreFull            no space left; nothing was written
    │   ├── StoreReadOnly        it may be read only; nothing was written
    │   └── StoreUnreachable     the database server is gone, or was never there
    ├── ToolError            about tools and their calls
    │   ├── InvalidTool      what cannot be a tool, or stands in a toolbox twice
    │   ├── UnknownTool      no tool has this name; ``known`` lists those there are
    │   ├── InvalidArguments a call's arguments do not fit; ``problems`` is for the model
    │   └── ToolFailed       raised by a tool itself: its words go to the model as they are
    ├── BatchFailed          a batch cannot go on; what was reached is kept
    ├── InvalidBatch         a batch that cannot be: a line without a prompt, two with one id
    ├── InvalidWorkflow      a workflow that cannot be: no rounds, a prompt without its inputs
    ├── WorkflowFailed       a workflow cannot go on; ``workflow`` names it, to be resumed
    ├── Unsendable           calls stand in the way of sending; ``problems`` names them
    ├── UnsupportedBlock     a block that this provider cannot express
    └── UnsupportedParameter a parameter, an option or a tool that cannot be sent to this provider

Messages say what happened and what to do. They never contain message content or keys. Every
error can be pickled, because work is spread over processes and its failures come back.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kedge.planning import RequestPlan
    from kedge.turns import Block, Turn


class KedgeError(Exception):
    """The root of every error that Kedge raises on purpose.

    ``state`` is set when the error leaves a ``Chat``: the state bytes reached so far.
    """

    state: bytes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[KedgeError], args: tuple[Any, ...], members: dict[str, Any]) -> KedgeError:
    """Make an unpickled error without ``__init__``, which asks each class for something else."""
    error = cls.__new__(cls, *args)
    error.__dict__.update(members)
    return error


class Blocked(KedgeError):
    """A guard stopped the Turn; ``rule`` names which."""

    def __init__(self, rule: str, where: str) -> None:
        super().__init__(f"blocked by the guard rule {rule!r} in {where}")
        self.rule = rule


class CannotConnect(KedgeError):
    """A model string, a key or a server is missing; the message says what to set."""


class UnconfirmedReference(CannotConnect):
    """Stored data names a model address, a function or a file that is not configured or confirmed."""


class CannotServe(KedgeError):
    """The server cannot start as asked: its database, its address, a setting."""


class InvalidFault(KedgeError, ValueError):
    """A fault of the server that cannot be: an unknown name, a missing or impossible value."""


class InvalidTurn(KedgeError, ValueError):
    """A Turn that cannot be."""


class InvalidJSON(InvalidTurn):
    """The JSON form of a value is malformed; ``path`` names the offending member."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem

    def prefix_path(self, prefix: str) -> "InvalidJSON":
        """The same problem, seen from further out."""
        return InvalidJSON(prefix + self.path, self.problem)


class BrokenInstallation(KedgeError):
    """A file of the package itself is damaged."""


class InvalidScript(KedgeError, ValueError):
    """A script of the practice model is wrong; ``place`` says where."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place} {problem}")
        self.place = place
        self.problem = problem


class InvalidSetting(KedgeError, ValueError):
    """A setting that cannot be; the message says which, and what it may be."""


class StoreError(KedgeError):
    """The store cannot do what was asked; ``retryable`` tells whether it may later."""

    retryable = False


class CannotOpenStore(StoreError):
    """The store cannot be opened: a wrong address or password, no database of ours, a newer one."""


class HeadConflict(StoreError):
    """Somebody else moved the head first.

    Nothing is lost: ``node`` is ours, saved on a branch of its own, and ``head`` is theirs.
    """

    def __init__(self, conversation: str, node: int, head: int) -> None:
        super().__init__(
            f"the head of {conversation} moved to node {head} meanwhile; ours is kept as node "
            f"{node}: refresh and go on from theirs, or fork(at={node}) to go on from ours"
        )
        self.conversation = conversation
        self.node = node
        self.head = head


class KeyReused(StoreError):
    """An idempotency key came back with another message than the first time."""


class NotInStore(StoreError, LookupError):
    """There is no such conversation, node or block."""


class StoreBusy(StoreError):
    """Others hold the store for too long: its lock, or every connection of the pool."""

    retryable = True


class StoreDamaged(StoreError):
    """What is stored is not what was written; ``verify`` names every place."""


class StoreFull(StoreError):
    """There is no space left; nothing was written."""


class StoreReadOnly(StoreError):
    """The store may only be read; nothing was written."""


class StoreUnreachable(StoreError):
    """The database server is gone, or was never there."""

    retryable = True


class ToolError(KedgeError):
    """About tools and their calls."""


class InvalidTool(ToolError, TypeError):
    """A function that cannot be a tool, or a tool that stands in a toolbox twice."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} cannot be a tool: {problem}")
        self.name = name
        self.problem = problem


class UnknownTool(ToolError, KeyError):
    """No tool has this name; ``known`` lists those there are."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        from difflib import get_close_matches

        guess = get_close_matches(name, known, n=1)
        hint = f"; did you mean {guess[0]}?" if guess else "."
        there = f"The tools are: {', '.join(known)}." if known else "There are no tools."
        super().__init__(f"there is no tool {name!r}{hint} {there}")
        self.name = name
        self.known = tuple(known)

    # KeyError would show the message in quotes.
    __str__ = Exception.__str__


class InvalidArguments(ToolError, ValueError):
    """The arguments of a call do not fit its tool; ``problems`` says how, one line each."""

    def __init__(self, tool: str, problems: Sequence[str]) -> None:
        count = len(problems)
        super().__init__(f"the arguments of a call of {tool} have {count} problem(s)")
        self.tool = tool
        self.problems = tuple(problems)


class ToolFailed(ToolError):
    """Raise it in a tool: the words go to the model as they are, and nothing is tried again."""


class BatchFailed(KedgeError):
    """A batch cannot go on; what was reached is kept, and the same command goes on from there."""


class InvalidBatch(KedgeError, ValueError):
    """A batch that cannot be; the message says which line, and what is wrong with it."""


class InvalidWorkflow(KedgeError, ValueError):
    """A workflow that cannot be; the message says what is wrong with it."""


class WorkflowFailed(KedgeError):
    """A workflow cannot go on; ``workflow`` is its id, under which what was reached is kept."""

    def __init__(self, workflow: str, problem: str) -> None:
        super().__init__(f"{problem}; what was reached is kept as the workflow {workflow}")
        self.workflow = workflow
        self.problem = problem


class Unsendable(KedgeError):
    """The Turn holds calls that stand in the way of sending it; ``problems`` names them."""

    def __init__(self, problems: Sequence[object]) -> None:
        listed = "; ".join(str(problem) for problem in problems)
        super().__init__(f"this Turn cannot be sent: {listed}")
        self.problems = tuple(problems)


class UnsupportedBlock(KedgeError):
    """A block that this provider cannot express."""


class UnsupportedParameter(KedgeError, ValueError):
    """A parameter or a tool that cannot be sent to this provider; ``param`` names it."""

    def __init__(self, param: str, remedy: str, problem: str = "") -> None:
        problem = problem or f"this provider does not support {param}"
        super().__init__(f"{problem}; {remedy}")
        self.param = param


class EngineError(KedgeError):
    """A request failed.

    ``turn`` is the Turn to go on from: what was sent, with everything that is known to hold.
    ``partial`` are blocks that arrived before the failure. ``retryable`` tells whether the same
    request may succeed later.
    """

    def __init__(
        self,
        message: str,
        *,
        provider: str = "",
        status: int | None = None,
        code: str = "",
        param: str = "",
        request_id: str = "",
        retryable: bool = False,
        retry_after: float | None = None,
        body: Any = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.provider = provider
        self.status = status
        self.code = code
        self.param = param
        self.request_id = request_id
        self.retryable = retryable
        self.retry_after = retry_after
        self.body = body
        self.plan: RequestPlan | None = None
        self.turn: Turn | None = None
        self.partial: tuple[Block, ...] = ()

    def __str__(self) -> str:
        where = [self.provider, f"HTTP {self.status}" if self.status else "", self.code]
        told = ", ".join(part for part in where if part)
        request = f" (request {self.request_id})" if self.request_id else ""
        return f"{told}: {self.message}{request}" if told else f"{self.message}{request}"


class AnswerIncomplete(EngineError):
    """The answer stopped before its end; ``code`` is the reason that the server gave."""


class RequestRefused(EngineError):
    """The server will not take the request."""


class ChainRefused(RequestRefused):
    """The server has no memory of the response that the request is based on."""


class ResendTooLong(ChainRefused):
    """The server forgot, and to send everything again is more than the request allows."""


class NotAuthorised(RequestRefused):
    """The key is missing, wrong, or not allowed to do this."""


class RateLimited(RequestRefused):
    """The server will not take the request now; ``retry_after`` says how long, if it said so."""


class ServerFailed(EngineError):
    """The server failed, or gave up on the response."""


class StreamCut(EngineError):
    """The stream ended before the answer did."""


class StreamTooLarge(EngineError):
    """A stream holds a line or a message beyond its bound; ``limit`` is the bound in bytes."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(
            f"the stream holds a {what} of more than {limit} bytes; raise max_{what} if that is right"
        )
        self.what = what
        self.limit = limit


class Unreachable(EngineError):
    """No connection, or no answer in time."""
