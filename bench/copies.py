#!/usr/bin/python3 -B
"""Measures what a second copy of each page costs, and how long a program stands still if a lender
dies.

Two regions have all pages in their cache, one with `--protection mirror` and one without. In turns,
a program writes every page of each, and `aquifer region persist` writes them to the lenders: one
lender, or both. The same follows with `--protection opportunistic`, and with `--protection disk`
for regions that fit into the ring of pages on their way to the disk (below $TMPDIR). Each ring is
empty before each turn. Then regions with an eighth of their pages in the cache are read and written
at random, one after another: with one copy, with `mirror` and with `opportunistic`. Next, in such a
region, one of the two lenders is killed. The script reports the longest time between two accesses,
and verifies each page. The lender comes back, and the script waits until both copies are whole.
Last, two such regions are only read, one with a second copy and one without, while the first lender
of each stands still for 40 ms five times a second. Lenders are processes at loopback addresses, so
pages are encrypted.
Needs root. Build first:
    cargo build --release -p aquifer-cli

Usage: bench/copies.py [--rounds N] [--size 256] [--json]
"""

import json
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from common import bench
from common.bench import AQUIFER, MIB, Failed, run, wait

PROGRAM = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
size = os.fstat(fd).st_size
memory = mmap.mmap(fd, size, mmap.MAP_SHARED)
print("ready", flush=True)
for line in sys.stdin:
    seed = int(line)
    for at in range(0, size, 4096):
        memory[at:at + 4096] = (b"%016d" % (at + seed)) * 256
    print("done", flush=True)
"""

# Accesses pages at random and verifies them. Reports times of an access, and the rate, for each
# part of the run that the script names.
LOAD = """
import mmap, os, random, select, sys, time
writes = len(sys.argv) < 3
fd = os.open(sys.argv[1], os.O_RDWR)
size = os.fstat(fd).st_size
memory = mmap.mmap(fd, size, mmap.MAP_SHARED)
versions = [0] * (size // 4096)
content = lambda page, version: (b"%08d%08d" % (page, version)) * 256
for page in range(len(versions)):
    memory[page * 4096:page * 4096 + 4096] = content(page, 0)
print("ready", flush=True)
wrong = 0
times = []
began = before = time.monotonic()
while True:
    page = random.randrange(len(versions))
    at = page * 4096
    wrong += memory[at:at + 4096] != content(page, versions[page])
    if writes and len(times) % 3 == 0:
        versions[page] += 1
        memory[at:at + 4096] = content(page, versions[page])
    now = time.monotonic()
    times.append(now - before)
    before = now
    if len(times) % 64 == 0 and select.select([sys.stdin], [], [], 0)[0]:
        if not sys.stdin.readline():
            break
        times.sort()
        p99 = times[len(times) * 99 // 100]
        rate = len(times) / (now - began)
        print(times[-1] * 1000, rate, wrong, len(times), p99 * 1000, flush=True)
        times = []
        began = before = time.monotonic()
"""


# The most that goes into the ring before the disk has any of it.
RING = 48 * MIB

# The least that a lease has.
EXTENT = 64 * MIB


class Lender:
    """An export whose pages outlive its process."""

    def __init__(self, work: Path, name: str, size: int):
        self.run_dir, self.size, self.address = work / name, size, "127.0.0.1:0"
        self.store = Path(tempfile.mkdtemp(prefix="copies-", dir="/dev/shm/aquifer"))
        self.process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        command = [
            AQUIFER, "--json", "--run-dir", self.run_dir, "serve", "export", "--size", self.size,
            "--nbd", self.address, "--dir", self.store,
        ]
        words = list(map(str, command))
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        ready = self.process.stdout.readline()
        if not ready:
            raise Failed("a lender did not start")
        self.uri = json.loads(ready)["uri"]
        self.address = self.uri.split("://")[1].rstrip("/")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill()
        shutil.rmtree(self.store, ignore_errors=True)


class Region:
    """A region, and a program that maps it."""

    def __init__(self, work: Path, name: str, size: int, cache: int, lenders: list, program: str,
                 kind: str = "mirror", options: tuple = ()):
        self.work, self.name, self.kind = work, name, kind
        uris = [word for lender in lenders for word in ("--lender", lender.uri)]
        made = self.aquifer("region", "create", name, "--size", size, "--cache", cache,
                            "--protection", kind, "--copy-dir", work / "copies", *uris)
        command = [AQUIFER, "--run-dir", work, "region", "exec", "--", "python3", "-c", program,
                   json.loads(made)["file"], *options]
        self.program = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self.program.stdout.readline() != "ready\n":
            raise Failed("the program did not start")

    def aquifer(self, *words) -> str:
        return run(AQUIFER, "--json", "--run-dir", self.work, *words)

    def ask(self, order: str) -> str:
        self.program.stdin.write(order + "\n")
        self.program.stdin.flush()
        return self.program.stdout.readline()

    def told(self) -> list:
        """What the load reports of the part of its run that ends now."""
        return [float(word) for word in self.ask("tell").split()]

    def is_whole(self) -> bool:
        lease = json.loads(self.aquifer("region", "show", self.name))["volume"]["leases"][0]
        if self.kind == "disk":
            return lease["disk"]["lacks"] + lease["disk"]["in_ring"] == 0
        copy = lease["copy"]
        missing = copy["lacks"] + copy["first_lacks"] + copy.get("ring", {}).get("used", 0)
        return copy["answer"] == [True, True] and missing == 0

    def end(self) -> None:
        self.program.kill()
        self.program.wait()

        def removed() -> bool:
            command = [AQUIFER, "--run-dir", self.work, "region", "rm", self.name]
            return subprocess.run(list(map(str, command)), capture_output=True).returncode == 0
        wait("the region's end", removed)


def cost(work: Path, rounds: int, size: int, kind: str) -> list:
    """The seconds that a region's pages take to its lenders, with one copy and with two."""
    lent = max(size, EXTENT)
    lenders = [Lender(work, name, lent) for name in ("alone", "one", "two")]
    regions: dict = {}
    found = []
    try:
        copied = lenders[1:2] if kind == "disk" else lenders[1:]
        for name, some in (("none", lenders[:1]), (kind, copied)):
            regions[name] = Region(work, name, size, size, some, PROGRAM, name)
        for turn in range(rounds):
            times = {}
            wait("whole copies", regions[kind].is_whole)
            for name in sorted(regions, reverse=turn % 2 == 0):
                region = regions[name]
                if region.ask(str(turn)) != "done\n":
                    raise Failed("the program ended")
                began = time.monotonic()
                region.aquifer("region", "persist", name)
                times[name] = time.monotonic() - began
            found.append(times)
        return found
    finally:
        for region in regions.values():
            region.end()
        for lender in lenders:
            lender.end()


def paged(work: Path, size: int) -> dict:
    """The accesses a second of a load that faults, and evicts pages, with each protection."""
    found = {}
    for kind in ("none", "mirror", "opportunistic"):
        lenders = [Lender(work, name, size) for name in ("one", "two")]
        region = None
        try:
            some = lenders[:1] if kind == "none" else lenders
            region = Region(work, "paged", size, size // 8, some, LOAD, kind)
            if kind != "none":
                wait("whole copies", region.is_whole)
            time.sleep(1)
            region.told()
            time.sleep(3)
            told = region.told()
            found[kind] = {"rate": told[1], "p99_ms": told[4], "pages_wrong": told[2]}
        finally:
            if region:
                region.end()
            for lender in lenders:
                lender.end()
    return found


def death(work: Path, size: int) -> dict:
    """The longest stall, the rate before, while one lender is dead, and after the repair."""
    lenders = [Lender(work, name, size) for name in ("first", "second")]
    region = None
    try:
        region = Region(work, "load", size, size // 8, lenders, LOAD)
        wait("whole copies", region.is_whole)

        told = region.told
        told()
        time.sleep(3)
        before = told()
        lenders[0].kill()
        time.sleep(4)
        dead = told()
        began = time.monotonic()
        lenders[0].start()
        wait("the repair", region.is_whole, pause=0.1)
        repaired = time.monotonic() - began
        during = told()
        time.sleep(3)
        after = told()
        runs = (before, dead, during, after)
        return {
            "stall_ms": dead[0],
            "longest_before_ms": before[0],
            "p99_before_ms": before[4],
            "p99_while_repaired_ms": during[4],
            "p99_while_repaired": during[4] / before[4],
            "longest_while_repaired_ms": during[0],
            "rate_dead": dead[1] / before[1],
            "rate_while_repaired": during[1] / before[1],
            "rate_after": after[1] / before[1],
            "repair_s": repaired,
            "pages_verified": sum(run[3] for run in runs),
            "pages_wrong": sum(run[2] for run in runs),
        }
    finally:
        if region:
            region.end()
        for lender in lenders:
            lender.end()


def late(work: Path, size: int) -> dict:
    """The times of reads while a lender stands still now and then, with one copy and with two."""
    lenders = [Lender(work, name, size) for name in ("halting", "steady")]
    found = {}
    try:
        for kind, some in (("none", lenders[:1]), ("mirror", lenders)):
            region = Region(work, "read", size, size // 8, some, LOAD, kind, ("only",))
            try:
                if kind == "mirror":
                    wait("whole copies", region.is_whole)
                # Until pages that the program wrote have left the cache: each waits for a lender.
                time.sleep(2)
                region.told()
                end = time.monotonic() + 3
                while time.monotonic() < end:
                    lenders[0].process.send_signal(signal.SIGSTOP)
                    time.sleep(0.04)
                    lenders[0].process.send_signal(signal.SIGCONT)
                    time.sleep(0.16)
                told = region.told()
                found[kind] = {"longest_ms": told[0], "p99_ms": told[4], "rate": told[1],
                               "pages_wrong": told[2]}
            finally:
                region.end()
        return found
    finally:
        for lender in lenders:
            lender.end()


def measure(rounds: int, size: int) -> dict:
    work = Path(tempfile.mkdtemp(prefix="aquifer-bench-"))
    Path("/dev/shm/aquifer").mkdir(exist_ok=True)
    try:
        seconds = {
            "mirror": cost(work, rounds, size, "mirror"),
            "opportunistic": cost(work, rounds, size, "opportunistic"),
            "disk": cost(work, rounds, min(size, RING), "disk"),
        }
        loads = [paged(work, size) for _ in range(rounds)]
        deaths = [death(work, size) for _ in range(rounds)]
        lates = [late(work, size) for _ in range(rounds)]
        return {
            "seconds": seconds,
            **{f"{kind}_beside_none": ratio(kind, times) for kind, times in seconds.items()},
            "loads": loads,
            "deaths": deaths,
            "late": lates,
        }
    finally:
        shutil.rmtree(work, ignore_errors=True)


def ratio(kind: str, times: list) -> dict:
    ratios = [time[kind] / time["none"] for time in times]
    return {"median": statistics.median(ratios), "lowest": min(ratios), "highest": max(ratios)}


def report(result: dict) -> None:
    for kind, second in (("mirror", "at a second lender"),
                         ("opportunistic", "at a second lender, a moment later"),
                         ("disk", "on the disk")):
        found = result[f"{kind}_beside_none"]
        print(f"a second copy {second} beside one copy, time of writes: {found['median']:.2f} "
              f"({found['lowest']:.2f} to {found['highest']:.2f})")
    for kind in ("mirror", "opportunistic"):
        rates = [one[kind]["rate"] / one["none"]["rate"] for one in result["loads"]]
        print(f"accesses a second with {kind} beside one copy: {statistics.median(rates):.2f} "
              f"({min(rates):.2f} to {max(rates):.2f})")
    for one in result["deaths"]:
        print(f"a lender dies: {one['stall_ms']:.0f} ms longest stall "
              f"({one['longest_before_ms']:.0f} ms before); rate {one['rate_dead']:.2f} while "
              f"it is dead, {one['rate_while_repaired']:.2f} and p99 "
              f"{one['p99_while_repaired']:.2f} times as long while it is repaired in "
              f"{one['repair_s']:.1f} s, {one['rate_after']:.2f} after; "
              f"{one['pages_verified']:.0f} pages verified, {one['pages_wrong']:.0f} wrong")
    for one in result["late"]:
        parts = [f"{kind} {one[kind]['p99_ms']:.1f} ms p99, {one[kind]['longest_ms']:.0f} ms "
                 f"longest" for kind in one]
        print(f"a lender stands still at times: {'; '.join(parts)}")


def main() -> None:
    parser = bench.arguments(__doc__, rounds=5)
    parser.add_argument("--size", type=int, default=256, help="MiB of each region (default: 256)")
    given = bench.parse(parser)
    bench.finish(measure(given.rounds, given.size * MIB), report)


if __name__ == "__main__":
    bench.start(main)
