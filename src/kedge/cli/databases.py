"""What ``kedge doctor`` finds out about the databases: there, sound, of which version.

They are only looked at: nothing is made, and nothing is brought up to date.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from kedge.cli.checks import Check
from kedge.config import Config, data_folder, mask_url, store_file, store_url
from kedge.errors import KedgeError


def check_databases(config: Config) -> Iterator[Check]:
    """The server's database, and the store of conversations."""
    yield check_sqlite("server.db", Path(config["serve.db"] or data_folder() / "server.db"))
    address = store_url(config["store"], make=False)
    file = store_file(address)
    if file is None:
        yield _check_version(address, mask_url(address))
        return
    folder = file.absolute().parent
    if not folder.exists() and folder != data_folder().absolute():
        advice = f"Make the folder ({folder}), or name another file."
        yield Check("store", "wrong", f"{file} cannot be made: its folder is not there", advice)
        return
    found = check_sqlite("store", file)
    sound = found.state == "ok" and file.exists()
    yield _check_version(f"{address}?mode=ro", str(file)) if sound else found


def check_sqlite(name: str, path: Path) -> Check:
    """A file of SQLite: opened for reading only, looked through quickly."""
    if str(path) == ":memory:":
        return Check(name, "ok", "in memory: nothing is kept")
    if not path.exists():
        return Check(name, "ok", f"{path} is not there yet; it is made when it is needed")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            (version,) = database.execute("PRAGMA user_version").fetchone()
            (sound,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        advice = "Move it away and let a new one be made, or bring back a copy."
        return Check(name, "wrong", f"{path} cannot be read: {error}", advice)
    if sound != "ok":
        advice = "Bring back a copy; 'sqlite3 FILE .recover' may save the rest."
        return Check(name, "wrong", f"{path} is damaged: {sound}", advice)
    size = path.stat().st_size / 1e6
    return Check(name, "ok", f"{path}, {size:.1f} MB, schema {version}")


def _check_version(address: str, shown: str) -> Check:
    """The schema of the store against the one that this Kedge writes."""
    from kedge.loops import run_sync
    from kedge.store.migrating import migrations, version_of
    from kedge.store.opening import open_database

    async def look() -> tuple[int, int]:
        database = open_database(address)
        try:
            found = await database.read(version_of)
        finally:
            await database.aclose()
        return found, len(migrations(database.dialect.name))

    try:
        found, newest = run_sync(look())
    except KedgeError as error:
        advice = "Look at the address, the password, and whether the database runs."
        return Check("store", "wrong", f"{shown} cannot be opened: {error}", advice)
    if found > newest:
        advice = "A newer Kedge wrote it: install that one."
        return Check("store", "wrong", f"{shown}, schema {found} of {newest} known", advice)
    older = f" of {newest}; it is brought up to date when it is opened" if found < newest else ""
    return Check("store", "ok", f"{shown}, schema {found}{older}")
