"""Hosts whose wall clock a drill sets: libfaketime tells all programs of a host another time.

The monotonic clocks, and the times of files, stay as they are.
"""

import time
from pathlib import Path

from scene.agents import DIR, AgentHost
from scene.certificates import certificate

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
CLOCK = f"{DIR}/clock"
ENVIRONMENT = (
    f"FAKETIME_TIMESTAMP_FILE={CLOCK}", "FAKETIME_NO_CACHE=1", "FAKETIME_DONT_FAKE_MONOTONIC=1",
    "NO_FAKE_STAT=1", "FAKETIME_DISABLE_SHM=1",
)
# How exactly an agent tells the time: by whole seconds of a certificate, a moment ago.
PRECISION_S = 10


class ClockHost(AgentHost):
    """A host with a clock of its own, which is right at first."""

    ahead_s = 0

    def command(self, *words) -> list:
        return super().command("env", f"LD_PRELOAD={LIBRARIES[0]}", *ENVIRONMENT, *words)

    def set_clock(self, ahead_s: int) -> None:
        """Sets the clock so many seconds ahead, or behind."""
        self.ahead_s = ahead_s
        path = self.root / CLOCK.lstrip("/")
        draft = path.with_suffix(".new")
        draft.write_text(f"{ahead_s:+d}\n")
        # At once: a program may read it at any time.
        draft.rename(path)

    def agent_follows(self) -> bool:
        """Returns whether the agent, which runs, tells this clock's time."""
        now = certificate(self)
        if now["left_s"] == 0:
            return now["ends"] <= time.time() + self.ahead_s + PRECISION_S
        return abs(now["ends"] - now["left_s"] - time.time() - self.ahead_s) < PRECISION_S
