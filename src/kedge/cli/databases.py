"""What ``kedge doctor`` finds out about the databases: there, sound, of which version."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from kedge.cli.checks import Check
from kedge.config import Config, data_folder


def check_databases(config: Config) -> Iterator[Check]:
    """The server's database."""
    yield check_sqlite("server.db", Path(config["serve.db"] or data_folder() / "server.db"))


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
