"""Backends: any engine as a model of the server, so that servers without a memory get one.

    settings = Settings(model=open_model("ollama:llama3.2"))

The server does not know engines, and a model of the server does not know the wire: this room joins the
two. ``load_models`` reads several of them, by name, from a file.
"""

from kedge.backends.engine_model import EngineModel
from kedge.backends.models_file import Models, load_models, open_model

__all__ = ["EngineModel", "Models", "load_models", "open_model"]
