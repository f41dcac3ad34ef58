#!/usr/bin/python3 -B
"""Measures a touch of a page that is with a lender: regions beside the simplest possible engine.

The floor is an engine of one thread that fetches pages and never evicts (`bare_engine`). A region
has a cache of a quarter of its size, which is full, so that every fault also evicts a page. Both
use a fresh lender, `aquifer serve export`, over the same transport, and the same program, which
touches every page once (`touches`). Targets: the region's median is at most 1.4 times the floor's,
and its 99th percentile at most 2 times.

The script also gives the processor time of a fault: of the program, the engine and the lender. It
includes the eviction of another page.

A scan with prefetch is compared with random touches. Target: at least 4 times the pages a second.
So is a stride of three pages, without a target. Reads by 16 threads are compared with those by one,
over an emulated link of 100 us. Target: at least 12 times the pages a second.
The same random reads of memory that `aquifer run` swaps to the same lender must be slower than a
region. Build first:
    cargo build --release --workspace --lib --bins --examples

Usage: bench/fault_latency.py [--rounds N] [--tcp] [--json]
    (as root, on an otherwise idle machine)
"""

import json
import shutil
import statistics
import subprocess
from pathlib import Path

from common import bench
from common.bench import AQUIFER, EXAMPLES, end
from common.lender import Lender

MIB = 256
TOUCHES = 20000
# Ratio, what it compares, and the target.
RATIOS = {
    "read_p50": ("read: median beside the floor's", "at most 1.4"),
    "read_p99": ("read: 99th percentile beside the floor's", "at most 2"),
    "write_p50": ("write: median beside the floor's", "at most 1.4"),
    "write_p99": ("write: 99th percentile beside the floor's", "at most 2"),
    "read_beside_swap": ("random reads a second beside swap's", "over 1"),
    "scan_beside_read": ("a scan's pages a second beside random reads'", "at least 4"),
    "stride_beside_read": ("a stride's pages a second beside random reads'", "none"),
    "threads_beside_one": ("16 threads' pages a second beside one's", "at least 12"),
}


class Measured(Lender):
    """A lender, and the loads that are measured over it."""

    def touches(self, file: Path, *words: str) -> dict:
        return json.loads(bench.run(EXAMPLES / "touches", file, *words))

    def floor(self, kind: str) -> dict:
        file = self.ram / "bare"
        command = [EXAMPLES / "bare_engine", file, f"{MIB}M", self.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
            try:
                engine.stdout.readline()
                return self.touches(file, "none", kind, "random", str(TOUCHES))
            finally:
                end(engine)
                file.unlink(missing_ok=True)
                shutil.rmtree(self.ram / ".bare", ignore_errors=True)

    def region(self, kind: str, order: str, prefetch: str) -> dict:
        file = self.create("region", MIB, MIB // 4 << 10, more=("--prefetch", prefetch))
        try:
            return self.with_cpu("region", file, kind, order, "1")
        finally:
            self.remove("region")

    def with_cpu(self, region: str, file: Path, kind: str, order: str, threads: str) -> dict:
        """Adds the processor time of each process, in microseconds a touch."""
        command = [EXAMPLES / "touches", file, "pause", kind, order, str(TOUCHES), threads]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as program:
            pids = {
                "program": program.pid, "engine": self.show(region)["pid"],
                "lender": self.process.pid,
            }
            program.stdout.readline()
            cpu = lambda pid: bench.cpu_seconds(Path(f"/proc/{pid}/stat"))
            before = {name: cpu(pid) for name, pid in pids.items()}
            program.stdin.write("\n")
            program.stdin.flush()
            result = json.loads(program.stdout.readline())
            for name, pid in pids.items():
                used = cpu(pid) - before[name]
                result[f"{name}_cpu_us"] = used * 1e6 / result["touches"]
            return result

    def linked(self, threads: int) -> dict:
        """Measures reads of so many threads over an emulated link that carries any number of pages
        at a time."""
        file = self.create(
            "linked", MIB, MIB // 4 << 10, more=("--prefetch", "off", "--emulate-link", "100us")
        )
        try:
            return self.with_cpu("linked", file, "read", "random", str(threads))
        finally:
            self.remove("linked")

    def swap(self) -> dict:
        command = [
            AQUIFER, "run", "--local", f"{MIB // 4}M", "--lender", self.uri, "--",
            EXAMPLES / "touches", f"{MIB}M", "fill", "read", "random", str(TOUCHES),
        ]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=self.env())
        return json.loads(done.stdout)


def measure(tcp: bool) -> dict:
    """Measures all loads once. The floor leaves its pages with the lender, which then refuses a
    second region: regions have another lender."""
    lender = Measured("floor", 2 * MIB, tcp)
    try:
        result = {"floor": lender.floor("read")}
    finally:
        lender.close()
    lender = Measured("region", 2 * MIB, tcp)
    try:
        return result | {
            "read": lender.region("read", "random", "off"),
            "write": lender.region("write", "random", "off"),
            "swap": lender.swap(),
            "scan": lender.region("read", "sequential", "auto"),
            "stride": lender.region("read", "stride", "auto"),
            "one thread": lender.linked(1),
            "16 threads": lender.linked(16),
        }
    finally:
        lender.close()


def ratios(rounds: list) -> dict:
    """Compares the loads, round by round."""

    def of(field: str, these: str, those: str) -> dict:
        return bench.spread(one[these][field] / one[those][field] for one in rounds)

    result = {
        f"{kind}_{percentile}": of(f"{percentile}_us", kind, "floor")
        for kind in ("read", "write") for percentile in ("p50", "p99")
    }
    result["read_beside_swap"] = of("pages_per_s", "read", "swap")
    for order in ("scan", "stride"):
        result[f"{order}_beside_read"] = of("pages_per_s", order, "read")
    result["threads_beside_one"] = of("pages_per_s", "16 threads", "one thread")
    return result


def report(result: dict) -> None:
    rounds = result["rounds"]
    head = f"{'p50 us':>9}{'p99 us':>9}{'p99.9 us':>10}{'pages/s':>10}"
    print(f"{'':<16}{head}   (medians of {len(rounds)} rounds)")
    for kind in rounds[0]:
        median = lambda key: statistics.median(one[kind][key] for one in rounds)
        print(
            f"{kind:<16}{median('p50_us'):9.1f}{median('p99_us'):9.1f}{median('p999_us'):10.1f}"
            f"{median('pages_per_s'):10.0f}"
        )
    print()
    for kind in ("read", "write", "16 threads"):
        parts = {
            part: statistics.median(one[kind][f"{part}_cpu_us"] for one in rounds)
            for part in ("program", "engine", "lender")
        }
        text = ", ".join(f"{part} {time:.1f}" for part, time in parts.items())
        print(f"processor time of a touch, us: {kind}: {text}; in all {sum(parts.values()):.1f}")
    print()
    for name, (text, target) in RATIOS.items():
        print(f"{text:<46}{bench.spread_text(result['ratios'][name])}; target: {target}")


def main() -> None:
    parser = bench.arguments(__doc__, rounds=5)
    parser.add_argument("--tcp", action="store_true", help="over loopback TCP, not a Unix socket")
    args = bench.parse(parser)
    rounds = [measure(args.tcp) for _ in range(args.rounds)]
    bench.finish({"rounds": rounds, "ratios": ratios(rounds)}, report)


if __name__ == "__main__":
    bench.start(main)
