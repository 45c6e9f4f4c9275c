"""A store in a forked process, which has none of the threads of the other one and must not use its connections."""

import subprocess
import sys

SCRIPT = """
import os, signal, sys
from kedge import Conversation, Turn, connect, open_store, user
from kedge.incremental import StoreIndex
from kedge.testing import serve

url = sys.argv[1]
store = open_store(url)
with serve() as server, store.sync as stored:
    engine = connect(f"responses:{server.base_url}#practice")
    chat = Conversation(engine, store=store).sync
    indexes = StoreIndex(store), StoreIndex(url)
    chat.send("My name is Ada.")
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert len(stored.conversations()) == (1 if "memory" in url else 2)
        chat.refresh()
        assert chat.send("What is my name?").text == "Your name is Ada."
        assert indexes[0].load_evidence("key") == (None if "memory" in url else {"seen": 1})
        print("done")
    else:
        signal.alarm(120)  # it ends also if it waits for a thread that it does not have
        assert chat.send("What is my name?").plan.previous_response_id
        assert engine.sync.run(Turn([user("Say 5")])).blocks[-1].text == "5"
        for index in indexes:
            index.save_evidence("key", {"seen": 1})
            assert index.load_evidence("key") == {"seen": 1}
            index.close()
        chat.fork()
        stored.close()
        os._exit(0)
    engine.sync.close()
    indexes[1].close()
"""


def test_a_forked_process_continues_with_its_own_connections(store_url: str) -> None:
    """Both processes continue a conversation that was opened before; a store in memory is copied."""
    # Python 3.12 and newer warn about a fork while there are threads, which is what the script tests.
    ignored = "ignore:This process:DeprecationWarning"
    command = [sys.executable, "-W", ignored, "-c", SCRIPT, store_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("done\n", "")
