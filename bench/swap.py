#!/usr/bin/python3 -B
"""Measures swap to memory behind a Unix socket: Aquifer (FUSE, loop) beside nbdkit, nbdfuse, loop.

Each round runs the same load against both in turn, so that disturbances fall on both alike. In a
memory cgroup of 256 MiB, a process fills 768 MiB with checked content. It then reads, checks and
rewrites pages at random. The figures are medians over the rounds. Target: at most 0.5 times the
peer's time. Needs root, nbdkit and nbdfuse. Build first:
    cargo build --release --workspace --examples

Usage: bench/swap.py [--rounds N] [--accesses N] [--limit 256M] [--memory 768M] [--workers N]
    [--json]
"""

import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

from common import bench
from common.bench import EXAMPLES, GIB, Failed, MemoryCgroup, end, note, run, wait

PRIORITY = 32000
DEVICE_SIZE = GIB


class Aquifer:
    """A lender's elastic store, and a volume process over it."""

    name = "aquifer"

    # How pages are encrypted; `None` for lenders of this host.
    encryption: dict | None = None

    def __init__(self):
        self.lender = self.pid = None

    def lease(self, socket: Path) -> dict:
        """A lease on all that the lender at this socket has."""
        return {
            "lease": uuid.uuid4().hex, "lender": "lender", "address": f"unix:{socket}",
            "export": "", "capacity": DEVICE_SIZE, "secure": False, "encryption": self.encryption,
        }

    def start(self, work: Path, workers: int) -> None:
        socket = work / "lender.sock"
        command = [EXAMPLES / "nbd_memory", f"unix:{socket}", str(DEVICE_SIZE)]
        self.lender = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        wait("the lender's socket", socket.exists)
        spec = {
            "volume": uuid.uuid4().hex, "capacity": DEVICE_SIZE, "leases": [self.lease(socket)],
            "backend": "fuse-loop", "workers": workers, "swap": True, "priority": PRIORITY,
            "io_timeout": {"secs": 8, "nanos": 0}, "identity": None, "spill": None,
            "state": str(work), "note": None,
        }
        starter = subprocess.Popen(
            [EXAMPLES / "volume_process", "serve", "volume"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )
        # The volume process detaches the volume if standard input ends before the word "keep".
        with starter:
            print(json.dumps({"serve": spec}), file=starter.stdin, flush=True)
            answer = json.loads(starter.stdout.readline())
            if answer["response"] != "status":
                raise Failed(f"the volume process: {answer['error']}")
            self.pid = answer["record"]["pid"]
            print("keep", file=starter.stdin, flush=True)

    def stop(self) -> None:
        def ended() -> bool:
            if Path(f"/proc/{self.pid}").exists():
                os.kill(self.pid, signal.SIGTERM)
                time.sleep(0.5)
            return not Path(f"/proc/{self.pid}").exists()

        if self.pid:
            # The volume process refuses to end while swapped pages do not fit into their cgroup.
            wait("the volume process to end", ended)
        if self.lender:
            end(self.lender)


class Nbdfuse:
    """nbdkit's memory plugin, nbdfuse over it and a loop device with direct I/O over that."""

    name = "nbdkit+nbdfuse"

    def __init__(self):
        self.processes: list = []
        self.file = self.device = None

    def start(self, work: Path, _workers: int) -> None:
        socket, self.file = work / "nbdkit.sock", work / "nbd"
        self.file.touch()
        self.process(*bench.nbdkit_memory(socket, DEVICE_SIZE))
        wait("nbdkit's socket", socket.exists)
        self.process("nbdfuse", self.file, f"nbd+unix:///?socket={socket}")
        wait("nbdfuse's file", lambda: self.file.stat().st_size == DEVICE_SIZE)
        self.device = run("losetup", "--find", "--show", "--direct-io=on", self.file).strip()
        run("mkswap", self.device)
        run("swapon", "--discard", "--priority", PRIORITY, self.device)

    def process(self, *command) -> None:
        # A session of its own keeps ctrl-C from it: the script ends its processes in order.
        self.processes.append(subprocess.Popen(command, start_new_session=True))

    def stop(self) -> None:
        if self.device:
            is_swap = lambda: self.device in Path("/proc/swaps").read_text().split()
            swapoff = lambda: subprocess.run(["swapoff", self.device]).returncode == 0
            wait("swapoff", lambda: not is_swap() or swapoff())
            run("losetup", "--detach", self.device)
        if self.file and os.path.ismount(self.file):
            run("umount", self.file)
        for process in reversed(self.processes):
            process.terminate()
            process.wait()


def run_load(name: str, arguments) -> list:
    """Fills memory and accesses it, in a cgroup; returns what the load says of each part."""
    cgroup = MemoryCgroup("swap", bench.size(arguments.limit))
    try:
        load = [EXAMPLES / "touch", arguments.memory, str(arguments.accesses)]
        done = subprocess.run(
            load, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            preexec_fn=cgroup.enter,
        )
        if done.returncode != 0:
            raise Failed(f"the load over {name} failed ({done.returncode})")
        return list(map(json.loads, done.stdout.splitlines()[:2]))
    finally:
        cgroup.remove()


def measure(peer, work: Path, arguments) -> dict:
    """Runs the load once against one peer."""
    under_test = peer()
    try:
        under_test.start(work, arguments.workers)
        return run_load(peer.name, arguments)[1]
    finally:
        under_test.stop()


def report(result: dict) -> None:
    head = f"{'us an access':>14} {'(lowest-highest)':>18} {'median':>9} {'99 %':>9}"
    print(f"{'':15} {head}")
    for name, runs in result["rounds"].items():
        means = [one["us_per_access"] for one in runs]
        p50, p99 = (statistics.median(one[key] for one in runs) for key in ("p50_us", "p99_us"))
        spread = f"({min(means):.1f}-{max(means):.1f})"
        print(f"{name:15} {statistics.median(means):14.1f} {spread:>18} {p50:9.1f} {p99:9.1f}")
    print(f"aquifer takes {bench.spread_text(result['ratio'])} times as long; target: at most 0.5")


def main() -> None:
    parser = bench.arguments(__doc__, rounds=5)
    parser.add_argument("--accesses", type=int, default=100_000)
    parser.add_argument("--limit", default="256M", help="of the cgroup")
    parser.add_argument("--memory", default="768M", help="that the process fills")
    parser.add_argument("--workers", type=int, default=4, help="threads of the volume process")
    arguments = bench.parse(parser)
    bench.require("nbdkit", "nbdfuse")

    peers = [Aquifer, Nbdfuse]
    rounds: dict = {peer.name: [] for peer in peers}
    for number in range(arguments.rounds):
        # Rounds start with either peer in turn.
        for peer in peers if number % 2 == 0 else reversed(peers):
            with tempfile.TemporaryDirectory(prefix="aquifer-bench-") as work:
                result = measure(peer, Path(work), arguments)
            rounds[peer.name].append(result)
            note(f"round {number + 1}: {peer.name:15} {result['us_per_access']:8.1f} us an access")

    ours, theirs = (rounds[peer.name] for peer in peers)
    ratios = [a["us_per_access"] / b["us_per_access"] for a, b in zip(ours, theirs)]
    bench.finish({"rounds": rounds, "ratio": bench.spread(ratios)}, report)


if __name__ == "__main__":
    bench.start(main)
