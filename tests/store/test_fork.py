"""A store in a forked process, which has none of the threads of the other one and must not use its connections."""

from forked import run_forked

# Python 3.12 and newer warn about a fork while there are threads, which is what the scripts test.
IGNORE_WARNING = (
    "import warnings; warnings.filterwarnings('ignore', 'This process', DeprecationWarning)"
)
SCRIPT = """
import os, signal, sys
from kedge import Conversation, Turn, connect, open_store, user
from kedge.chaining import StoreIndex
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
    done = run_forked("-c", IGNORE_WARNING + SCRIPT, store_url)
    assert (done.stdout, done.stderr) == ("done\n", "")


CLOSING_SCRIPT = """
import os, signal, sys
from kedge.chaining import StoreIndex

index = StoreIndex(sys.argv[1])
index.save_evidence("first", {"seen": 1})
(closed, tell_closed), (written, tell_written) = os.pipe(), os.pipe()
if child := os.fork():
    os.read(written, 1)
    index.close()
    os.write(tell_closed, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    index = StoreIndex(sys.argv[1])
    print([bool(index.load_evidence(key)) for key in ("first", "second", "third")])
    index.close()
else:
    signal.alarm(120)
    index.save_evidence("second", {"seen": 2})
    os.write(tell_written, b".")
    os.read(closed, 1)
    index.save_evidence("third", {"seen": 3})
    index.close()
    sys.exit()
"""


def test_a_store_that_the_other_process_closes_loses_nothing(store_url: str) -> None:
    """The forked process holds its own locks on the file, so that the other one leaves the journal to it."""
    kept = "memory" not in store_url
    done = run_forked("-c", IGNORE_WARNING + CLOSING_SCRIPT, store_url)
    assert (done.stdout, done.stderr) == (f"{[kept] * 3}\n", "")
