"""Methods of `Store` that are one transaction: functions of a transaction, bound to the class.

    class Store:
        children = read(nodes.list_children)

The function defines the parameters, the result and the docstring of the method.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from kedge.database.transactions import Tx

P = ParamSpec("P")
T = TypeVar("T")

if TYPE_CHECKING:
    from types import CoroutineType

    from kedge.store.store import Store

    _Method = Callable[Concatenate[Store, P], CoroutineType[Any, Any, T]]


def read(work: Callable[Concatenate[Tx, P], T]) -> "_Method[P, T]":
    """Return the method that runs a function of queries."""

    @wraps(work)
    async def method(self: "Store", *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.database.read(bind(self, work, *args, **kwargs))

    return _describe(method, work)


def write(work: Callable[Concatenate[Tx, P], T]) -> "_Method[P, T]":
    """Return the method that runs a function of statements, again after a conflict; it is durable then."""

    @wraps(work)
    async def method(self: "Store", *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.database.write(bind(self, work, *args, **kwargs))

    return _describe(method, work)


def bind(
    store: "Store", work: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs
) -> Callable[[Tx], T]:
    """Return a function as the work of a transaction with the settings of a store."""

    def run(tx: Tx) -> T:
        tx.clock, tx.body_bytes, tx.scopes = store.clock, store.stored_body_bytes, store.scope_names
        return work(tx, *args, **kwargs)

    return run


def _describe(method: "_Method[P, T]", work: Callable[..., T]) -> "_Method[P, T]":
    """Give a method the signature and docstring of its function, with the store instead of the transaction."""
    signature = inspect.signature(work)
    _, *others = signature.parameters.values()
    store = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(method)["__signature__"] = signature.replace(parameters=[store, *others])
    method.__doc__ = (work.__doc__ or "").replace("        tx: The transaction.\n", "")
    return method
