"""Show methods such as ``children = read(nodes.list_children)`` in the reference as the functions that they bind."""

from typing import Any

import griffe

BINDERS = {"kedge.store.store.read", "kedge.store.store.write"}


class BoundMethods(griffe.Extension):
    """Replace attributes whose value is a bound function of a transaction by methods."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Replace the attributes of `Store`."""
        store = pkg["store.store.Store"]
        for name, member in list(store.members.items()):
            value = member.value if member.is_attribute else None
            if isinstance(value, griffe.ExprCall) and value.canonical_path in BINDERS:
                path = value.arguments[0].canonical_path.removeprefix(f"{pkg.name}.")
                store.set_member(name, _make_method(name, pkg[path]))


def _make_method(name: str, function: griffe.Function) -> griffe.Function:
    """Return a function of a transaction as a method."""
    store = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    method = griffe.Function(
        name,
        parameters=griffe.Parameters(store, *list(function.parameters)[1:]),
        returns=function.returns,
        lineno=function.lineno,
        endlineno=function.endlineno,
    )
    method.labels.add("async")
    if function.docstring:
        text = function.docstring.value.replace("    tx: The transaction.\n", "")
        style, options = function.docstring.parser, function.docstring.parser_options
        method.docstring = griffe.Docstring(
            text, parent=method, parser=style, parser_options=options
        )
    return method
