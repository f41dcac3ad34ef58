"""A PID namespace for a drill: when the drill ends, in any way, the kernel ends all it started."""

import ctypes
import os
import signal
import sys

from common.bench import Failed, run

CLONE_NEWNS, CLONE_NEWPID = 0x00020000, 0x20000000
PR_SET_PDEATHSIG = 1


def enclosed(main) -> None:
    """Runs `main` as the first process of a new PID namespace, and exits as it does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWPID | CLONE_NEWNS):
        raise Failed(f"drills need root, for namespaces: {os.strerror(ctypes.get_errno())}")
    drill = os.fork()
    if drill == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        run("mount", "--make-rprivate", "/")
        run("mount", "-t", "proc", "proc", "/proc")
        main()
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(drill, number))
    _, status = os.waitpid(drill, 0)
    code = os.waitstatus_to_exitcode(status)
    sys.exit(code if code >= 0 else 128 - code)
