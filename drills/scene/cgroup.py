"""Memory cgroups whose limit kills a process."""

import os
import signal
from pathlib import Path

from common.bench import CGROUP_V1, MemoryCgroup

from scene import wait


class Trap(MemoryCgroup):
    """A cgroup; what runs in it gets no memory beyond the limit, and no swap."""

    def __init__(self, name: str, limit: int):
        super().__init__(name, limit, may_swap=False)

    def __enter__(self) -> "Trap":
        return self

    def __exit__(self, *_) -> None:
        for process in (self.path / "cgroup.procs").read_text().split():
            os.kill(int(process), signal.SIGKILL)
        self.remove()

    def take(self, process: int) -> None:
        (self.path / "cgroup.procs").write_text(str(process))

    def kills(self) -> int:
        """Returns how many processes the kernel's OOM killer has killed here."""
        name = "memory.oom_control" if CGROUP_V1 else "memory.events"
        words = (self.path / name).read_text().split()
        return int(words[words.index("oom_kill") + 1])

    def wait_for_kill(self, process: int) -> None:
        wait(f"the end of process {process}", lambda: is_gone(process))
        wait("the OOM killer's count", lambda: self.kills() > 0)


def is_gone(process: int) -> bool:
    """Returns whether a process has ended; one that nobody has waited for counts as ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return not os.path.exists(f"/proc/{process}")
