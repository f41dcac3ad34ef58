#!/usr/bin/env python3
"""Swap to memory behind a unix socket: Aquifer (FUSE + loop) beside nbdkit + nbdfuse + loop.

Each round runs the same load against both in turn, so that whatever else the machine does falls on both alike: a process
in a memory control group of 256 MiB fills 768 MiB with checked content and then reads, checks and rewrites pages at
random. Figures are medians over the rounds. Needs root, nbdkit and nbdfuse:
    apt-get install nbdkit libnbd-bin fuse3
    cargo build --release -p aquifer-blockdev -p aquifer-fabric --examples

Usage: lab/swap [--rounds N] [--accesses N] [--limit 256M] [--memory 768M] [--json]
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = Path(os.environ.get("AQUIFER_EXAMPLES", ROOT / "target/release/examples"))
PRIORITY = 32000
DEVICE_SIZE = 1 << 30


class Aquifer:
    """A lender's elastic store, and a volume process over it."""

    name = "aquifer"

    def __init__(self, work: Path):
        self.work = work
        socket = work / "lender.sock"
        self.lender = subprocess.Popen([EXAMPLES / "nbd_memory", f"unix:{socket}", str(DEVICE_SIZE)], stdout=subprocess.DEVNULL)
        wait_until("the lender's socket", socket.exists)
        lease = {
            "lease": uuid.uuid4().hex, "lender": "lender", "address": f"unix:{socket}", "export": "",
            "capacity": DEVICE_SIZE, "secure": False,
        }
        spec = {
            "volume": uuid.uuid4().hex, "capacity": DEVICE_SIZE, "leases": [lease], "backend": "fuse-loop",
            "workers": int(os.environ.get("AQUIFER_WORKERS", "4")), "swap": True, "priority": PRIORITY,
            "io_timeout": {"secs": 8, "nanos": 0}, "identity": None, "spill": None, "state": str(work), "note": None,
        }
        started = subprocess.run(
            [EXAMPLES / "volume_process", "volume-serve"], input=json.dumps({"serve": spec}), stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, check=True,
        )
        answer = json.loads(started.stdout)
        if answer["response"] != "status":
            raise SystemExit(f"lab/swap: the volume process: {answer['error']}")
        self.pid = answer["record"]["pid"]

    def stop(self):
        def ended():
            if Path(f"/proc/{self.pid}").exists():
                os.kill(self.pid, signal.SIGTERM)
                time.sleep(0.5)
            return not Path(f"/proc/{self.pid}").exists()

        # Refused while a process that others run has pages there that do not fit into its control group.
        wait_until("the end of the volume process", ended)
        self.lender.kill()
        self.lender.wait()


class Nbdfuse:
    """nbdkit's memory plugin, nbdfuse over it and a loop device with direct I/O over that."""

    name = "nbdkit+nbdfuse"

    def __init__(self, work: Path):
        socket, self.file = work / "nbdkit.sock", work / "nbd"
        self.file.touch()
        self.processes = [subprocess.Popen(["nbdkit", "-f", "-U", socket, "memory", str(DEVICE_SIZE)])]
        wait_until("nbdkit's socket", socket.exists)
        self.processes.append(subprocess.Popen(["nbdfuse", self.file, f"nbd+unix:///?socket={socket}"]))
        wait_until("nbdfuse's file", lambda: self.file.stat().st_size == DEVICE_SIZE)
        self.device = run("losetup", "--find", "--show", "--direct-io=on", self.file).strip()
        run("mkswap", self.device)
        run("swapon", "--discard", "--priority", str(PRIORITY), self.device)

    def stop(self):
        wait_until("the end of swap", lambda: subprocess.run(["swapoff", self.device]).returncode == 0)
        run("losetup", "--detach", self.device)
        run("umount", self.file)
        for process in reversed(self.processes):
            process.terminate()
            process.wait()


def run(*command) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def wait_until(what: str, condition):
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"lab/swap: {what} did not come within 60 s")
        time.sleep(0.01)


class Group:
    """A memory control group, v1 or v2."""

    def __init__(self, limit: int):
        v1 = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists()
        self.path = Path("/sys/fs/cgroup/memory" if v1 else "/sys/fs/cgroup") / f"aquifer-lab-{os.getpid()}"
        if not v1:
            Path("/sys/fs/cgroup/cgroup.subtree_control").write_text("+memory")
        self.path.mkdir()
        (self.path / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(limit))

    def enter(self):
        (self.path / "cgroup.procs").write_text("0")

    def remove(self):
        self.path.rmdir()


def measure(peer, work: Path, arguments) -> dict:
    """One run of the load against one peer."""
    under_test = peer(work)
    group = Group(size(arguments.limit))
    try:
        load = [EXAMPLES / "touch", arguments.memory, str(arguments.accesses)]
        done = subprocess.run(load, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, preexec_fn=group.enter)
        if done.returncode != 0:
            raise SystemExit(f"lab/swap: the load over {peer.name} failed with {done.returncode}")
        return json.loads(done.stdout.splitlines()[1])
    finally:
        group.remove()
        under_test.stop()


def size(text: str) -> int:
    return int(text.rstrip("MGiB")) << (30 if "G" in text else 20)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--accesses", type=int, default=100_000)
    parser.add_argument("--limit", default="256M")
    parser.add_argument("--memory", default="768M")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    peers = [Aquifer, Nbdfuse]
    for program in ("nbdkit", "nbdfuse"):
        if not shutil.which(program):
            raise SystemExit(f"lab/swap: {program} is missing: apt-get install nbdkit libnbd-bin fuse3")

    results = {peer.name: [] for peer in peers}
    for number in range(arguments.rounds):
        # Who comes first changes from round to round.
        for peer in peers if number % 2 == 0 else reversed(peers):
            with tempfile.TemporaryDirectory(prefix="aquifer-lab-") as work:
                result = measure(peer, Path(work), arguments)
            results[peer.name].append(result)
            print(f"round {number + 1}: {peer.name:15} {result['us_per_access']:8.1f} us an access", file=sys.stderr)

    ours, theirs = (results[peer.name] for peer in peers)
    ratios = [a["us_per_access"] / b["us_per_access"] for a, b in zip(ours, theirs)]
    if arguments.json:
        print(json.dumps({"rounds": results, "ratios": ratios, "ratio": statistics.median(ratios)}))
        return
    print(f"{'':15} {'us an access':>14} {'(lowest-highest)':>18} {'median':>9} {'99 %':>9}")
    for name, runs in results.items():
        means = [run["us_per_access"] for run in runs]
        p50, p99 = (statistics.median(run[key] for run in runs) for key in ("p50_us", "p99_us"))
        spread = f"({min(means):.1f}-{max(means):.1f})"
        print(f"{name:15} {statistics.median(means):14.1f} {spread:>18} {p50:9.1f} {p99:9.1f}")
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    print(f"aquifer takes {statistics.median(ratios):.2f} times as long (round by round {spread})")


if __name__ == "__main__":
    main()
