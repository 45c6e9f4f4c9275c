"""The error hierarchy. Every error that Kedge raises deliberately is a ``KedgeError``.

    KedgeError
    ├── Blocked                    a guard rule stopped the Turn
    ├── CannotConnect              a model string, an API key or a server address is missing or wrong
    │   └── UnconfirmedReference   stored data names an address or a function that is not confirmed
    ├── CannotServe                the server cannot start with these settings
    ├── EngineError                a request failed
    │   ├── AnswerIncomplete       the response stopped before its end
    │   ├── RequestRefused         the server rejected the request (4xx)
    │   │   ├── ChainRefused       ... because it does not have the previous response
    │   │   │   └── ResendTooLong  ... and a full send exceeds the limit of the request
    │   │   ├── NotAuthorized      ... because of the API key
    │   │   └── RateLimited        ... because of a rate limit
    │   ├── ServerFailed           the server failed (5xx), or failed to generate the response
    │   ├── StreamCut              the stream ended before the response was complete
    │   ├── StreamTooLarge         a response, or a line or message of a stream, exceeds its limit
    │   └── Unreachable            no connection, or a timeout
    ├── InvalidTurn                an invalid Turn or block: a duplicate or unknown id, a wrong type
    │   ├── InvalidJSON            malformed JSON form of a Turn or block
    │   └── UnmatchedResult        a new tool result belongs to no open call
    ├── InvalidFault               an invalid fault of the local server
    ├── BrokenInstallation         a file of the package itself is damaged
    ├── InvalidScript              an invalid script of the practice model
    ├── SchemaTooComplex           a JSON schema that the practice model cannot satisfy within its limits
    ├── InvalidSetting             an invalid setting or argument
    │   ├── InvalidBatch           ... an invalid batch file, or a line of it
    │   ├── InvalidType            ... an argument of a wrong type
    │   ├── InvalidWorkflow        ... the parts of a workflow do not match
    │   └── UnknownSetting         ... no setting has this name
    ├── StoreError                 a store operation failed
    │   ├── CannotOpenStore        a wrong address or password, not a Kedge database, or a newer one
    │   ├── HeadConflict           another process moved the head first
    │   ├── KeyReused              an idempotency key was used for two different messages
    │   ├── NotInStore             no such conversation, node or block
    │   ├── StoreBusy              a lock or a connection was not available in time
    │   ├── StoreDamaged           stored data fails verification
    │   ├── StoreFull              no space left
    │   ├── StoreReadOnly          the store is read-only
    │   ├── StoreReplaced          the file of the store was removed or replaced
    │   └── StoreUnreachable       no connection to the database server
    ├── ToolError                  a problem with a tool or a tool call
    │   ├── InvalidTool            a function that cannot be a tool, or a duplicate name
    │   ├── UnknownTool            no tool has this name
    │   ├── InvalidArguments       the arguments of a call do not match the tool
    │   └── ToolFailed             raised by a tool; its message is sent to the model
    ├── OutputError                an answer has no value of the requested type
    │   ├── OutputInvalid          ... because it does not match, also after retries
    │   └── OutputRefused          ... because the model refused to answer
    ├── BatchFailed                a batch stopped; completed work is stored
    ├── WorkflowFailed             a workflow stopped and can be resumed
    ├── Unsendable                 tool calls and results of the Turn do not match
    ├── UnsupportedBlock           a block that this provider does not support
    └── UnsupportedParameter       a parameter or tool that this provider does not support

Messages state what happened and what to do. They never contain message content or API keys. Every error can be
pickled, so that worker processes can return it.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kedge.events import Usage
    from kedge.planning import RequestPlan
    from kedge.turns import Block, Turn


EXTRAS = {
    "dbos": ("dbos", "batches in worker processes"),
    "encryption": ("cryptography", "encrypted states and reasoning"),
    "mcp": ("mcp", "tools of MCP servers"),
    "openai": ("openai", "clients of OpenAI's package in engines and kedge.chain"),
    "otel": ("opentelemetry-api", "traces"),
    "postgres": ("psycopg", "conversations in PostgreSQL"),
}
"""The extras of the package: what each installs, and what needs it."""


def describe_extra(extra: str) -> str:
    """Return what needs an extra that is not installed, and how to install it."""
    package, use = EXTRAS[extra]
    return f"{use} need the package {package}: pip install 'kedge-llm[{extra}]'"


def describe_type(value: object) -> str:
    """Return the type of an argument for an error; for a coroutine, that ``await`` is missing."""
    if hasattr(value, "cr_await"):
        return "a coroutine: write await before the call that returns it"
    return type(value).__name__


def find_similar(name: str, known: Iterable[str]) -> str:
    """Return the known name that an unknown one most likely means, or an empty text."""
    from difflib import get_close_matches

    return next(iter(get_close_matches(name, list(known), n=1)), "")


class KedgeError(Exception):
    """The base class of every error that Kedge raises deliberately.

    Attributes:
        state: The state bytes reached so far, if a ``Chat`` raised the error.
    """

    state: bytes | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(cls: type[KedgeError], args: tuple[Any, ...], members: dict[str, Any]) -> KedgeError:
    """Unpickle an error without ``__init__``, whose parameters differ between classes."""
    error = cls.__new__(cls, *args)
    error.__dict__.update(members)
    return error


class Blocked(KedgeError):
    """A guard rule stopped the Turn.

    Attributes:
        rule: The name of the rule.
    """

    def __init__(self, rule: str, where: str) -> None:
        super().__init__(f"blocked by the guard rule {rule!r} in {where}")
        self.rule = rule


class CannotConnect(KedgeError):
    """A model string, an API key or a server address is missing or wrong; the message names what to set."""


class UnconfirmedReference(CannotConnect):
    """Stored data names a model address, a function or a file that is not configured or confirmed."""


class CannotServe(KedgeError):
    """The server cannot start with this database, address or setting."""


class InvalidFault(KedgeError, ValueError):
    """A fault of the local server is invalid: an unknown name, or a missing or invalid value."""


class InvalidTurn(KedgeError, ValueError):
    """A Turn or block is invalid: a duplicate or unknown id, or a value of the wrong type."""


class InvalidJSON(InvalidTurn):
    """The JSON form of a Turn or block is malformed.

    Attributes:
        path: The path of the invalid member, such as ``$.blocks[0].text``.
        problem: What is wrong with it.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem

    def prefix_path(self, prefix: str) -> "InvalidJSON":
        """Return the same error with a longer path.

        Args:
            prefix: The text that is put before the path.

        Returns:
            The new error.
        """
        return InvalidJSON(prefix + self.path, self.problem)


class UnmatchedResult(InvalidTurn):
    """A tool result that was passed belongs to no open call; nothing was sent or stored.

    Attributes:
        call_id: The id of the call in the result.
        expected: The right id; empty if it is not known.
    """

    def __init__(self, message: str, call_id: str = "", expected: str = "") -> None:
        super().__init__(message)
        self.call_id = call_id
        self.expected = expected


class BrokenInstallation(KedgeError):
    """A file of the package itself is damaged."""


class InvalidScript(KedgeError, ValueError):
    """A script of the practice model is invalid.

    Attributes:
        place: The file and entry.
        problem: What is wrong with it.
    """

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place} {problem}")
        self.place = place
        self.problem = problem


class SchemaTooComplex(KedgeError):
    """The practice model cannot generate a value for a JSON schema within its limits.

    Attributes:
        problem: The limit that is exceeded.
    """

    def __init__(self, problem: str) -> None:
        super().__init__(f"a value for the JSON schema {problem}; simplify the schema")
        self.problem = problem


class InvalidSetting(KedgeError, ValueError):
    """A setting or an argument is invalid; the message names it and its valid values."""


class InvalidBatch(InvalidSetting):
    """A batch file is invalid; the message names the line and the problem."""


class InvalidType(InvalidSetting, TypeError):
    """An argument has a wrong type; the message names it and the types that it may have."""


class InvalidWorkflow(InvalidSetting):
    """The parts of a workflow do not match, such as its steps and their names; the message names the problem."""


class UnknownSetting(InvalidSetting, TypeError):
    """There is no setting with this name.

    Args:
        name: The name that was given.
        known: The names of the settings.
        owner: What has these settings.
        advice: What to use for the purpose, if there is no similar name.
    """

    def __init__(self, name: str, known: Iterable[str], owner: str, advice: str = "") -> None:
        names = sorted(known)
        problem = f"{owner} has no setting {name!r}"
        similar = find_similar(name, names)
        if similar:
            problem = f"{problem}; did you mean {similar!r}?"
        elif advice:
            problem = f"{problem}; {advice}."
        else:
            problem = f"{problem}."
        super().__init__(f"{problem} The settings are: {', '.join(names)}.")
        self.name = name


class StoreError(KedgeError):
    """A store operation failed.

    Args:
        problem: What happened, and what to do.
        location: The file or the address of the store, with which the message begins.

    Attributes:
        problem: The message without the location, which a server does not tell its clients.
        location: The file or the address of the store, or an empty string.
        retryable: Whether the same operation may succeed later.
        turn: The Turn with the answer, if a ``Conversation`` received one and could not store it.
    """

    retryable = False
    turn: "Turn | None" = None

    def __init__(self, problem: str, location: str = "") -> None:
        super().__init__(f"{location}: {problem}" if location else problem)
        self.problem = problem
        self.location = location


def describe_for_client(error: BaseException) -> str:
    """Return the message of an error for the client of a server, without the path or the address of the store."""
    if isinstance(error, StoreError):
        return error.problem
    return str(error)


class CannotOpenStore(StoreError):
    """The store cannot be opened: a wrong address or password, not a Kedge database, or a newer one."""


class HeadConflict(StoreError):
    """Another process or task moved the head of the conversation first. Both branches are stored.

    Attributes:
        conversation: The conversation.
        node: The node that the head was not moved to, on a separate branch.
        head: The node at which the head is.
    """

    def __init__(self, conversation: str, node: int, head: int) -> None:
        super().__init__(
            f"the head of {conversation} is at node {head}, because another process or task moved it; it was "
            f"not moved to node {node}, which is stored: refresh to continue from node {head}, or "
            f"fork(at={node}) to continue from node {node}"
        )
        self.conversation = conversation
        self.node = node
        self.head = head


class KeyReused(StoreError):
    """An idempotency key was used for two different messages."""


class NotInStore(StoreError, LookupError):
    """There is no such conversation, node or block."""


class StoreBusy(StoreError):
    """A lock, or a connection of the pool, was not available in time."""

    retryable = True


class StoreDamaged(StoreError):
    """Stored data fails verification; ``verify`` lists every problem."""


class StoreFull(StoreError):
    """No space is left; nothing was written."""


class StoreReadOnly(StoreError):
    """The store is read-only; nothing was written."""


class StoreReplaced(StoreError):
    """The file of the store was removed or replaced while it was open."""


class StoreUnreachable(StoreError):
    """There is no connection to the database server."""

    retryable = True


class ToolError(KedgeError):
    """A problem with a tool or a tool call."""


class InvalidTool(ToolError, TypeError):
    """A function cannot be a tool, or two tools have the same name.

    Attributes:
        name: The name of the function.
        problem: Why it cannot be a tool.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} cannot be a tool: {problem}")
        self.name = name
        self.problem = problem


class UnknownTool(ToolError, KeyError):
    """No tool has this name.

    Attributes:
        name: The name that was called.
        known: The names of the tools.
    """

    def __init__(self, name: str, known: Sequence[str]) -> None:
        similar = find_similar(name, known)
        hint = f"; did you mean {similar}?" if similar else "."
        available = f"The tools are: {', '.join(known)}." if known else "There are no tools."
        super().__init__(f"there is no tool {name!r}{hint} {available}")
        self.name = name
        self.known = tuple(known)

    # KeyError shows its message in quotes.
    __str__ = Exception.__str__


class InvalidArguments(ToolError, ValueError):
    """The arguments of a call do not match the tool.

    Attributes:
        tool: The tool's name.
        problems: What is wrong, one line each, for the model.
    """

    def __init__(self, tool: str, problems: Sequence[str]) -> None:
        count = len(problems)
        super().__init__(f"the arguments of a call of {tool} have {count} problem(s)")
        self.tool = tool
        self.problems = tuple(problems)


class ToolFailed(ToolError):
    """Raised by a tool: its message is sent to the model unchanged, and the call is not retried."""


class OutputError(KedgeError):
    """An answer has no value of the requested type.

    Attributes:
        text: The text of the answer.
        turn: The Turn with the answer.
    """

    def __init__(self, message: str, text: str = "", turn: "Turn | None" = None) -> None:
        super().__init__(message)
        self.text = text
        self.turn = turn


class OutputInvalid(OutputError):
    """The answer does not match the requested type, also after retries.

    Attributes:
        text: The text of the last answer.
        problems: What is wrong with it, one line each.
        attempts: The number of requested answers.
        turn: The Turn with all answers and the corrections between them.
    """

    def __init__(
        self, text: str, problems: Sequence[str], attempts: int = 1, turn: "Turn | None" = None
    ) -> None:
        super().__init__(
            f"the answer does not match the requested type after {attempts} attempt(s), with "
            f"{len(problems)} problem(s): see the attributes problems and text; a clearer prompt, another "
            "model or a larger output_retries may help",
            text,
            turn,
        )
        self.problems = tuple(problems)
        self.attempts = attempts


class OutputRefused(OutputError):
    """The model refused to answer, so that there is no value of the requested type.

    Attributes:
        text: The text of the refusal.
        turn: The Turn with the refusal.
    """

    def __init__(self, text: str, turn: "Turn | None" = None) -> None:
        super().__init__(
            "the model refused to answer: see the attribute text; change the prompt", text, turn
        )


class BatchFailed(KedgeError):
    """A batch stopped; completed work is stored, and the same command continues from there."""


class WorkflowFailed(KedgeError):
    """A workflow stopped; completed steps are stored.

    Attributes:
        workflow: The id of the workflow, by which it can be resumed.
        problem: Why it stopped.
    """

    def __init__(self, workflow: str, problem: str) -> None:
        super().__init__(
            f"{problem}; completed steps are stored as workflow {workflow}, which can be resumed"
        )
        self.workflow = workflow
        self.problem = problem


class Unsendable(KedgeError):
    """The Turn cannot be sent because its tool calls and results do not match.

    Attributes:
        problems: The calls and results, as ``kedge.planning.Problem``.
    """

    def __init__(self, problems: Sequence[object]) -> None:
        listed = "; ".join(str(problem) for problem in problems)
        super().__init__(f"this Turn cannot be sent: {listed}")
        self.problems = tuple(problems)


class UnsupportedBlock(KedgeError):
    """A block has no form in the API of this provider.

    Args:
        message: The problem and the remedy.
        block_id: The id of the block, if it is known.

    Attributes:
        block_id: The id of the block, or an empty string.
    """

    def __init__(self, message: str, block_id: str = "") -> None:
        super().__init__(message)
        self.block_id = block_id


class UnsupportedParameter(KedgeError, ValueError):
    """A parameter, option or tool is not supported by this provider.

    Args:
        param: Its name.
        remedy: What to do instead.
        problem: The problem, if it is another one.

    Attributes:
        param: Its name.
    """

    def __init__(self, param: str, remedy: str, problem: str = "") -> None:
        problem = problem or f"this provider does not support {param}"
        super().__init__(f"{problem}; {remedy}")
        self.param = param


class EngineError(KedgeError):
    """A request failed.

    Attributes:
        message: A description of the problem, and what to do.
        provider: The provider.
        status: The HTTP status, if there was a response.
        code: The server's error code.
        param: The request parameter that caused the error.
        request_id: The server's id of the request.
        retryable: Whether the same request may succeed later.
        retry_after: Seconds after which to retry, if the server sent a hint.
        body: The parsed error body, if any.
        plan: The plan that the request was built from.
        turn: The Turn to continue from: what was sent, with the changes that are known to be valid.
        partial: The blocks that arrived before the failure.
        response_id: The id of the response, if it ended as incomplete or failed.
        usage: The tokens of that response, if the server sent any.
        server: The name by which the server identifies itself in its headers; empty if it does not.
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
        self.response_id = ""
        self.usage: Usage | None = None
        self.server = ""

    @property
    def reported_code(self) -> str:
        """The server's error code, or else the HTTP status as text; empty if there was no response."""
        return self.code or str(self.status or "")

    def __str__(self) -> str:
        source = [self.provider]
        if self.status:
            source.append(f"HTTP {self.status}")
        if self.code != str(self.status):  # some servers repeat the status
            source.append(self.code)
        text = self.message
        if any(source):
            text = f"{', '.join(filter(None, source))}: {text}"
        if self.request_id:
            text = f"{text} (request {self.request_id})"
        return text


class AnswerIncomplete(EngineError):
    """The response stopped before its end; ``code`` is the server's reason."""


class RequestRefused(EngineError):
    """The server rejected the request."""


class ChainRefused(RequestRefused):
    """The server does not have the previous response that the request is chained on."""


class ResendTooLong(ChainRefused):
    """The server lost the previous response, and a full send exceeds the limit of the request."""


class NotAuthorized(RequestRefused):
    """The API key is missing, wrong, or not permitted to do this."""


class RateLimited(RequestRefused):
    """A rate limit was exceeded; ``retry_after`` is the server's hint, if it sent one."""


class ServerFailed(EngineError):
    """The server failed, or failed to generate the response."""


class StreamCut(EngineError):
    """The stream ended before the response was complete."""


class StreamTooLarge(EngineError):
    """A response, or a line or message of a stream, exceeds its limit.

    Attributes:
        what: ``response``, ``line`` or ``message``.
        limit: The limit in bytes.
    """

    def __init__(self, what: str, limit: int) -> None:
        setting = "max_response_bytes" if what == "response" else f"max_{what}"
        super().__init__(
            f"the server sent a {what} of more than {limit} bytes; increase {setting} if that is expected"
        )
        self.what = what
        self.limit = limit


class Unreachable(EngineError):
    """The server could not be reached, or did not answer in time."""
