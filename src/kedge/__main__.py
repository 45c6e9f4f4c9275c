"""Run the ``kedge`` command, also with ``python -m kedge``; Ctrl-C during this import ends it without a traceback."""

import sys

try:
    from kedge.cli import main
except KeyboardInterrupt:
    sys.stderr.write("Interrupted.\n")
    sys.exit(130)

if __name__ == "__main__":
    main()
