"""The blocks of Turn JSON 1 as they are written today, for tests with files of older versions."""

from typing import Any


def upgrade(block: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of a block of version 1 in version 2: a source, and Kedge's own metadata with a prefix."""
    metadata = dict(block.get("metadata", {}))
    source = [metadata.pop("response_id", ""), metadata.pop("item_id", "")]
    source.append(metadata.pop("output_index", None))
    if "outcome" in metadata:
        metadata["kedge.outcome"] = metadata.pop("outcome")
    rest = {name: member for name, member in block.items() if name != "metadata"}
    return {
        **rest,
        **({"metadata": metadata} if metadata else {}),
        **({} if source == ["", "", None] else {"source": source}),
    }
