"""A lender on this host, with regions over it: `aquifer serve export` over a Unix socket or
loopback TCP.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from common.bench import AQUIFER, Failed, aquifer, note, wait

EXTENT_MIB = 64
# Seconds in which the programs that map a region must have ended before it is removed.
REMOVE_TIMEOUT = 10


def remove_region(name: str, env: dict) -> None:
    """Removes a region. A program that mapped it may still be about to end, so this retries."""
    refusal = ""

    def removed() -> bool:
        nonlocal refusal
        command = [AQUIFER, "region", "rm", name]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        refusal = done.stderr.strip()
        return done.returncode == 0 or "no region" in refusal

    try:
        wait(f"the removal of region {name}", removed, REMOVE_TIMEOUT, 0.05)
    except Failed as failed:
        note(f"{failed}: {refusal}")


class Lender:
    """A lender of `mib` MiB, a scratch directory, and the regions that still exist."""

    def __init__(self, name: str, mib: int, tcp: bool = False):
        self.regions: list = []
        self.dir = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        self.ram = Path(tempfile.mkdtemp(prefix=f"aquifer-{name}-", dir="/dev/shm"))
        self.address = "127.0.0.1:10898" if tcp else f"unix:{self.dir}/lender"
        uri = "nbd://127.0.0.1:10898/"
        self.uri = uri if tcp else f"nbd+unix:///?socket={self.dir}/lender"
        room = -(-mib // EXTENT_MIB) * EXTENT_MIB
        # A session of its own keeps ctrl-C from the lender: the script ends its processes in order.
        self.process = subprocess.Popen(
            [AQUIFER, "--json", "serve", "export", "--size", f"{room}M", "--nbd", self.address,
             "--dir", self.ram / "pages"],
            stdout=subprocess.PIPE, text=True, env=self.env(), start_new_session=True,
        )
        if not self.process.stdout.readline():
            self.close()
            raise Failed("the lender did not start")

    def env(self) -> dict:
        return os.environ | {"AQUIFER_RUN_DIR": str(self.dir)}

    def aquifer(self, *words):
        return aquifer(*words, env=self.env())

    def create(
        self, name: str, size_mib: int, cache_kib: int, link: str | None = None, more: tuple = ()
    ) -> Path:
        """Creates a region, and returns its file. With `link`, its pages cross an emulated link,
        one at a time, instead of the way to the lender."""
        self.regions.append(name)
        if link:
            where = ["--emulate-link", link, "--one-at-a-time"]
        else:
            where = ["--lender", self.uri, "--unencrypted"]
        created = self.aquifer(
            "region", "create", name, "--size", f"{size_mib}M", "--cache", f"{cache_kib}K",
            *where, *more,
        )
        return Path(created["file"])

    def show(self, name: str) -> dict:
        return self.aquifer("region", "show", name)

    def remove(self, name: str) -> None:
        remove_region(name, self.env())
        self.regions.remove(name)

    def close(self) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in list(self.regions):
            self.remove(name)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)
        shutil.rmtree(self.ram, ignore_errors=True)
        signal.signal(signal.SIGINT, before)
