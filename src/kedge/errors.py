"""The whole error tree. Every error that Kedge raises on purpose is a ``KedgeError``.

    KedgeError
    ├── CannotServe          the server cannot start as asked
    ├── InvalidTurn          a Turn that cannot be: two blocks with one id, an unknown block id
    │   └── InvalidJSON      malformed JSON form; ``path`` names the offending member
    ├── BrokenInstallation   a file of the package itself is damaged
    ├── InvalidScript        a script of the practice model is wrong; ``place`` says where
    ├── StreamTooLarge       a stream holds a line or a message beyond its bound
    ├── Unsendable           calls stand in the way of sending; ``problems`` names them
    └── UnsupportedBlock     a block that this provider cannot express

Messages say what happened and what to do. They never contain message content or keys.
"""

from collections.abc import Sequence


class KedgeError(Exception):
    """The root of every error that Kedge raises on purpose."""


class CannotServe(KedgeError):
    """The server cannot start as asked: its database, its address, a setting."""


class InvalidTurn(KedgeError, ValueError):
    """A Turn that cannot be."""


class InvalidJSON(InvalidTurn):
    """The JSON form of a value is malformed; ``path`` names the offending member."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class BrokenInstallation(KedgeError):
    """A file of the package itself is damaged."""


class InvalidScript(KedgeError, ValueError):
    """A script of the practice model is wrong; ``place`` says where."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place} {problem}")
        self.place = place
        self.problem = problem


class StreamTooLarge(KedgeError):
    """A stream holds a line or a message beyond its bound; ``limit`` is the bound in bytes."""

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(
            f"the stream holds a {what} of more than {limit} bytes; raise max_{what} if that is right"
        )
        self.what = what
        self.limit = limit


class Unsendable(KedgeError):
    """The Turn holds calls that stand in the way of sending it; ``problems`` names them."""

    def __init__(self, problems: Sequence[object]) -> None:
        listed = "; ".join(str(problem) for problem in problems)
        super().__init__(f"this Turn cannot be sent: {listed}")
        self.problems = tuple(problems)


class UnsupportedBlock(KedgeError):
    """A block that this provider cannot express."""
