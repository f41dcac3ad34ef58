#!/usr/bin/env -S python3 -B
"""One touch of a page that is with a lender: regions beside the least that an engine can be.

The floor is an engine of one thread that fetches a page and puts it there, and never has one leave (`bare_engine`). A region has a
cache of a quarter of it, which is full, so that every fault also has a page leave. Both from the same lender, `aquifer export`, over
the same transport, with the same program that touches every page once (`touches`). Wanted: the region's median at most 1.4 of the floor's, its
99th percentile at most 2 of it. And a scan with prefetch: at least 4 times the pages a second of random touches; and the same random reads
of memory that is swapped to the same lender, by `aquifer run`: slower than a region.

Build first: cargo build --release --workspace --lib --bins --examples

Usage: lab/floor [--rounds N] [--tcp] [--json]      (as root, on a machine that does nothing else)
"""

import argparse
import json
import shutil
import statistics
import subprocess
from pathlib import Path

from lender import AQUIFER, BUILT, Lender

MIB = 256
TOUCHES = 20000


class Lab(Lender):
    """A lender, and what is measured over it."""

    def touches(self, file: Path, *words: str) -> dict:
        done = subprocess.run([BUILT / "examples/touches", file, *words], check=True, capture_output=True, text=True)
        return json.loads(done.stdout)

    def floor(self, kind: str) -> dict:
        file = self.ram / "bare"
        command = [BUILT / "examples/bare_engine", file, f"{MIB}M", self.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
            engine.stdout.readline()
            try:
                return self.touches(file, "none", kind, "random", str(TOUCHES))
            finally:
                engine.kill()
                file.unlink()
                shutil.rmtree(self.ram / ".bare")

    def region(self, kind: str, order: str, prefetch: str) -> dict:
        file = self.create("floor", MIB, MIB // 4 << 10, more=["--prefetch", prefetch])
        try:
            return self.touches(file, "fill", kind, order, str(TOUCHES))
        finally:
            self.remove("floor")

    def swap(self) -> dict:
        command = [AQUIFER, "run", "--local", f"{MIB // 4}M", "--lender", self.uri, "--",
                   BUILT / "examples/touches", f"{MIB}M", "fill", "read", "random", str(TOUCHES)]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=self.env()).stdout)


def ratio(what: str, values: list, wanted: str) -> None:
    print(f"{what:<44}{statistics.median(values):6.2f}  ({min(values):.2f} to {max(values):.2f}; wanted: {wanted})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tcp", action="store_true", help="over loopback TCP, not a unix socket")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    lab, rounds = Lab("floor", 2 * MIB, args.tcp), []
    try:
        for _ in range(args.rounds):
            rounds.append({
                "floor": lab.floor("read"),
                "read": lab.region("read", "random", "off"),
                "write": lab.region("write", "random", "off"),
                "swap": lab.swap(),
                "scan": lab.region("read", "sequential", "auto"),
            })
    finally:
        lab.close()
    if args.json:
        print(json.dumps(rounds))
        return
    print(f"{'':<16}{'p50 us':>9}{'p99 us':>9}{'p99.9 us':>10}{'pages/s':>10}   (medians of {args.rounds} rounds)")
    for kind in rounds[0]:
        middle = {of: statistics.median(run[kind][of] for run in rounds) for of in rounds[0][kind]}
        print(f"{kind:<16}{middle['p50_us']:9.1f}{middle['p99_us']:9.1f}{middle['p999_us']:10.1f}{middle['pages_per_s']:10.0f}")
    print()
    for kind in ("read", "write"):
        ratio(f"{kind}: median beside the floor's", [run[kind]["p50_us"] / run["floor"]["p50_us"] for run in rounds], "at most 1.4")
        ratio(f"{kind}: 99th percentile beside the floor's", [run[kind]["p99_us"] / run["floor"]["p99_us"] for run in rounds], "at most 2")
    ratio("random reads a second beside swap's", [run["read"]["pages_per_s"] / run["swap"]["pages_per_s"] for run in rounds], "over 1")
    ratio("a scan's pages a second beside random reads'", [run["scan"]["pages_per_s"] / run["read"]["pages_per_s"] for run in rounds], "at least 4")


if __name__ == "__main__":
    main()
