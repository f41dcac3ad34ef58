"""A lender on this host with regions over it, for the lab's scripts: `aquifer export` over a unix socket or loopback TCP. All of it ends with `close`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT = Path(os.environ.get("AQUIFER_BUILT", ROOT / "target/release"))
AQUIFER = BUILT / "aquifer"
EXTENT_MIB = 64
TIMEOUT = 10


class Lender:
    """A lender of `mib` MiB, a directory for what is measured, and the regions that were made and not yet removed."""

    def __init__(self, name: str, mib: int, tcp: bool = False):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        self.regions: list = []
        self.dir = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        self.ram = Path(tempfile.mkdtemp(prefix=f"aquifer-{name}-", dir="/dev/shm"))
        self.address = "127.0.0.1:10898" if tcp else f"unix:{self.dir}/lender"
        self.uri = "nbd://127.0.0.1:10898/" if tcp else f"nbd+unix:///?socket={self.dir}/lender"
        room = -(-mib // EXTENT_MIB) * EXTENT_MIB
        # In a session of its own, as all that regions need: ctrl-C is for the script, which ends them in order.
        self.process = subprocess.Popen([AQUIFER, "--json", "export", f"{room}M", "--nbd", self.address, "--dir", self.ram / "pages"],
                                        stdout=subprocess.PIPE, text=True, env=self.env(), start_new_session=True)
        if not self.process.stdout.readline():
            self.close()
            sys.exit(f"{sys.argv[0]}: no lender")

    def env(self) -> dict:
        return os.environ | {"AQUIFER_RUN_DIR": str(self.dir)}

    def aquifer(self, *words: str) -> dict:
        done = subprocess.run([AQUIFER, "--json", *map(str, words)], capture_output=True, text=True, env=self.env())
        if done.returncode != 0:
            raise SystemExit(f"{sys.argv[0]}: aquifer {' '.join(map(str, words))}: {done.stderr.strip()}")
        return json.loads(done.stdout or "{}")

    def create(self, name: str, size_mib: int, cache_kib: int, link: str | None = None, more: tuple = ()) -> Path:
        """The region's file. With `link` its pages cross an emulated link, one at a time, in place of going to the lender."""
        self.regions.append(name)
        way = ["--emulate-link", link, "--one-at-a-time"] if link else ["--lender", self.uri, "--unsealed"]
        made = self.aquifer("region", "create", name, "--size", f"{size_mib}M", "--cache", f"{cache_kib}K", *way, *more)
        return Path(made["file"])

    def show(self, name: str) -> dict:
        return self.aquifer("region", "show", name)

    def remove(self, name: str) -> None:
        """Whoever mapped it may have ended a moment ago."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            done = subprocess.run([AQUIFER, "region", "rm", name], capture_output=True, text=True, env=self.env())
            if done.returncode == 0 or "no region" in done.stderr or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if time.monotonic() > deadline:
            print(f"{sys.argv[0]}: {name} is still there: {done.stderr.strip()}", file=sys.stderr)
        self.regions.remove(name)

    def close(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for name in list(self.regions):
            self.remove(name)
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)
        shutil.rmtree(self.ram, ignore_errors=True)


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
