"""``kedge gc``: reclaim the space of deleted data."""

from typing import TYPE_CHECKING

from kedge.cli.base import command as kedge_command
from kedge.cli.base import echo, echo_json
from kedge.cli.store_options import erase_practice_responses, run_with_store, store_option
from kedge.config import store_file, store_url
from kedge.text_format import format_size, pluralize

if TYPE_CHECKING:
    from kedge.store import Store


@kedge_command("gc", short_help="Reclaim the space of deleted data.")
@store_option
def command(store: str, as_json: bool) -> None:
    """Reclaim the space of deleted data.

    Branches that were undone or regenerated are history and remain.
    """

    async def work(opened: "Store") -> int:
        swept = await opened.gc()  # deletes expired conversations, too
        await erase_practice_responses(opened, store)
        return swept

    file = store_file(store_url(store, create=False))
    before = file.stat().st_size if file and file.exists() else 0
    swept = run_with_store(work, given=store)
    freed = max(before - file.stat().st_size, 0) if file else None
    if as_json:
        echo_json({"blocks": swept, "freed_bytes": freed})
    else:
        space = "" if freed is None else f", {format_size(freed)} reclaimed"
        echo(f"{pluralize(swept, 'block')} removed{space}")
