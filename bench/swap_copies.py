#!/usr/bin/python3 -B
"""Measures what a second copy of each page costs swap: `--protection mirror` beside `none`.

Each round runs the same load over both in turn, so that disturbances fall on both alike. In a
memory cgroup of 256 MiB, a process fills 768 MiB with checked content: two thirds are written to
swap. It then reads, checks and rewrites pages at random, which reads and writes swap. The lenders
are processes at Unix sockets, and pages are encrypted as for other hosts. The script checks that
the second copy is whole before and after each load. Target: at most 1.25 times the time. Needs
root. Build first:
    cargo build --release -p aquifer-blockdev -p aquifer-nbd --examples

Usage: bench/swap_copies.py [--rounds N] [--accesses N] [--limit 256M] [--memory 768M] [--json]
"""

import json
import secrets
import socket
import subprocess
import tempfile
import uuid
from pathlib import Path

import swap
from common import bench
from common.bench import EXAMPLES, Failed, end, note, wait


class Mirror(swap.Aquifer):
    """Swap with one copy of each page, or with two at two lenders."""

    def __init__(self, copies: int):
        super().__init__()
        self.copies, self.others, self.work = copies, [], None

    def start(self, work: Path, workers: int) -> None:
        self.work = work
        self.encryption = {"key": secrets.token_hex(32), "mode": "random"}
        super().start(work, workers)
        if self.copies == 1:
            return
        address = work / "second.sock"
        self.others.append(subprocess.Popen(
            [EXAMPLES / "nbd_memory", f"unix:{address}", str(swap.DEVICE_SIZE)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        ))
        wait("the second lender's socket", address.exists)
        lease = self.lease(address)
        of = self.ask({"request": "status"})["record"]["spec"]["leases"][0]["lease"]
        self.ask({"request": "add_copy", "of": of, "lease": lease})
        wait("whole copies", self.is_whole)

    def ask(self, request: dict) -> dict:
        """Sends a request to the volume's process, and returns its answer."""
        [path] = (self.work / "volumes").glob("*.sock")
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(connection.makefile().readline())
        if answer["response"] == "failed":
            raise Failed(f"the volume's process: {answer['error']}")
        return answer

    def is_whole(self) -> bool:
        copy = self.ask({"request": "status"})["volume"]["leases"][0].get("copy")
        return bool(copy) and copy["answer"] == [True, True] and (
            copy["lacks"] + copy["first_lacks"] == 0
        )

    def stop(self) -> None:
        super().stop()
        for other in self.others:
            end(other)


def measure(copies: int, work: Path, arguments) -> dict:
    """Runs the load once: the seconds to fill memory, and the microseconds of an access."""
    under_test = Mirror(copies)
    try:
        under_test.start(work, arguments.workers)
        filled, accessed = swap.run_load(f"{copies} copies", arguments)
        if copies == 2 and not under_test.is_whole():
            raise Failed("a copy fell behind during the load")
        return {"fill_s": filled["seconds"], "access_us": accessed["us_per_access"]}
    finally:
        under_test.stop()


def report(result: dict) -> None:
    for name in ("none", "mirror"):
        runs = result["rounds"][name]
        fill = bench.spread_text(bench.spread(run["fill_s"] for run in runs))
        access = bench.spread_text(bench.spread(run["access_us"] for run in runs), 1)
        print(f"{name:8} fill {fill} s, access {access} us")
    for what in ("fill_s", "access_us"):
        print(f"mirror beside none, {what}: {bench.spread_text(result['ratio'][what])}; "
              "target: at most 1.25")


def main() -> None:
    parser = bench.arguments(__doc__, rounds=5)
    parser.add_argument("--accesses", type=int, default=50_000)
    parser.add_argument("--limit", default="256M", help="of the cgroup")
    parser.add_argument("--memory", default="768M", help="that the process fills")
    parser.add_argument("--workers", type=int, default=4, help="threads of the volume process")
    arguments = bench.parse(parser)
    kinds = {"none": 1, "mirror": 2}
    rounds: dict = {name: [] for name in kinds}
    for number in range(arguments.rounds):
        # Rounds start with either kind in turn.
        for name in sorted(kinds, reverse=number % 2 == 0):
            with tempfile.TemporaryDirectory(prefix="aquifer-bench-") as work:
                result = measure(kinds[name], Path(work), arguments)
            rounds[name].append(result)
            note(f"round {number + 1}: {name:8} fill {result['fill_s']:.2f} s, "
                 f"{result['access_us']:.1f} us an access")
    ratio = {
        what: bench.spread(two[what] / one[what] for one, two in zip(*rounds.values()))
        for what in ("fill_s", "access_us")
    }
    bench.finish({"rounds": rounds, "ratio": ratio}, report)


if __name__ == "__main__":
    bench.start(main)
