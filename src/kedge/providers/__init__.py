"""Model strings: ``connect("openai:gpt-5")`` returns an engine."""

from typing import TYPE_CHECKING

from kedge._internal.lazy_names import make_getattr
from kedge.providers.model_strings import (
    ENTRY_POINT_GROUP,
    connect,
    names_address,
    providers,
    to_engine,
)

if TYPE_CHECKING:
    from kedge.providers.models_file import Models, load_models, open_model
else:
    __getattr__ = make_getattr(
        __name__,
        {
            "Models": "kedge.providers.models_file",
            "load_models": "kedge.providers.models_file",
            "open_model": "kedge.providers.models_file",
        },
    )

__all__ = [
    "ENTRY_POINT_GROUP",
    "Models",
    "connect",
    "load_models",
    "names_address",
    "open_model",
    "providers",
    "to_engine",
]
