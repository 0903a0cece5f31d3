"""Runs a script that does not outlive its parent: `python child.py SCRIPT [ARGUMENT ...]`.

The parent holds the other end of this process's standard input. However the parent ends, the input then ends, and the
script receives SIGTERM, on which `scripts/train.py` saves a checkpoint and stops. It is killed if it takes too long.
"""

import os
import runpy
import signal
import sys
import threading
import time

GRACE_SECONDS = 60.0
"""How long the script may take to stop."""


def terminate_with_parent() -> None:
    """Reads standard input to its end, then sends SIGTERM to this process, and SIGKILL if it is still there later."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])  # as for a script that is started directly
    threading.Thread(target=terminate_with_parent, daemon=True).start()
    runpy.run_path(sys.argv[0], run_name="__main__")
