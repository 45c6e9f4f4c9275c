"""``kedge gc``: gives back the space of what was deleted, and of nothing else."""

from typing import TYPE_CHECKING

from kedge.cli.base import command as kedge_command
from kedge.cli.base import echo, echo_json
from kedge.cli.store_options import run_with_store, store_option
from kedge.config import store_file, store_url
from kedge.formatting import pluralize

if TYPE_CHECKING:
    from kedge.store import Store


@kedge_command("gc", short_help="Give back the space of what was deleted.")
@store_option
def command(store: str, as_json: bool) -> None:
    """Give back the space of what was deleted.

    Branches that were undone, regenerated or lost a race are history, and stay.
    """

    async def work(opened: "Store") -> int:
        return await opened.gc()

    file = store_file(store_url(store, create=False))
    before = file.stat().st_size if file and file.exists() else 0
    swept = run_with_store(work, given=store)
    freed = max(before - file.stat().st_size, 0) if file else None
    if as_json:
        echo_json({"blocks": swept, "freed_bytes": freed})
    else:
        space = "" if freed is None else f", {freed / 1e6:.1f} MB given back"
        echo(f"{pluralize(swept, 'block')} removed{space}")
