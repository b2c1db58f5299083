"""Stop the embedded server after its last user: a small process of its own, started by embedded.py.

Every user of the server holds a shared lock, which the kernel drops however the user ends; we wait for the
exclusive one. Run by path with `-I -S`: imports only the standard library, and nothing of ours.
"""

import fcntl
import os
import signal
import subprocess
import sys


def wait_for_last(users: int, start: int) -> None:
    """Return when nobody uses the server, holding the start lock so that nobody begins to."""
    while True:
        fcntl.flock(users, fcntl.LOCK_EX)
        # Start before users is everybody's order; so let go, and look again with both.
        fcntl.flock(users, fcntl.LOCK_UN)
        fcntl.flock(start, fcntl.LOCK_EX)
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(start, fcntl.LOCK_UN)
        else:
            return


def main(users: str, start: str, uid: str, gid: str, *command: str) -> None:
    """Leave the caller's session, wait, and run `command` as uid and gid ("-" for ourselves).

    The other inherited descriptor is the keeper's own lock, held until this process ends.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # its users decide, and they get these too
        signal.signal(number, signal.SIG_IGN)
    wait_for_last(int(users), int(start))
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if uid == "-":
        subprocess.run(command, check=False, stdin=subprocess.DEVNULL)
    else:
        subprocess.run(command, check=False, stdin=subprocess.DEVNULL, user=int(uid), group=int(gid), extra_groups=[])


if __name__ == "__main__":
    main(*sys.argv[1:])
