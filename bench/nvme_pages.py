#!/usr/bin/env python3
"""4 KiB random reads over loopback TCP: NVMe/TCP from our initiator to our target, as ratios within each round.

Depth 1 beside a bare ping-pong (64 bytes there, 4 KiB back, over the same sockets with the same waiting): the ratio of the
median times, at most 1.15. Depth 32 beside our NBD (in the clear): the ratio of the pages a second, at least 1.5; and the same
exchange bare, 32 requests and then 32 pages, which is the most that any protocol could reach. Build first:
    cargo build --release -p aquifer-fabric --examples

Usage: lab/nvme [--rounds N] [--seconds S] [--json]
"""

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = Path(os.environ.get("AQUIFER_EXAMPLES", ROOT / "target/release/examples"))
ADDRESS = "127.0.0.1:0"
SIZE = "64M"
# What is measured: kind and depth.
RUNS = [("bare", 1), ("nvme", 1), ("nbd", 1), ("bare", 32), ("nbd", 32), ("nvme", 32)]


class Server:
    """One of the servers, and what it said when it was ready: where it listens, and as what."""

    def __init__(self, name: str, *arguments: str):
        self.process = subprocess.Popen(
            [str(EXAMPLES / name), ADDRESS, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True,
        )
        words = self.process.stdout.readline().split()
        if words[:2] != ["listening", "on"]:
            raise SystemExit(f"{name} does not serve")
        self.address = words[2]
        self.name = words[4:]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def read(kind: str, depth: int, seconds: float, server: Server) -> dict:
    """One run of the load."""
    command = [str(EXAMPLES / "page_reads"), kind, server.address, str(depth), str(seconds), *server.name]
    rate, median = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return {"pages_per_s": float(rate), "median_us": float(median)}


def told(what: str, values: list[float], wanted: str = "") -> None:
    middle, low, high = statistics.median(values), min(values), max(values)
    print(f"{what:<58}{middle:6.2f}  ({low:.2f} to {high:.2f}{wanted and f'; wanted: {wanted}'})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object with all samples")
    args = parser.parse_args()
    servers = {}
    results = {run: [] for run in RUNS}
    try:
        servers["bare"] = Server("ping_pong")
        servers["nbd"] = Server("nbd_memory", SIZE)
        servers["nvme"] = Server("nvme_memory", SIZE)
        for turn in range(args.rounds):
            # Nobody always comes first.
            for at in range(len(RUNS)):
                kind, depth = run = RUNS[(at + turn) % len(RUNS)]
                results[run].append(read(kind, depth, args.seconds, servers[kind]))
    finally:
        for server in servers.values():
            server.stop()
    if args.json:
        print(json.dumps({f"{kind}-{depth}": samples for (kind, depth), samples in results.items()}))
        return
    for (kind, depth), samples in results.items():
        rate = statistics.median(sample["pages_per_s"] for sample in samples)
        median = statistics.median(sample["median_us"] for sample in samples)
        print(f"{kind + ', ' + str(depth) + ' at a time':<58}{rate:10,.0f} pages/s, {median:8.2f} us")
    def ratios(field: str, these: tuple[str, int], those: tuple[str, int]) -> list[float]:
        return [a[field] / b[field] for a, b in zip(results[these], results[those])]

    told("1 at a time: time of NVMe to a bare ping-pong", ratios("median_us", ("nvme", 1), ("bare", 1)), "at most 1.15")
    told("32 at a time: pages of NVMe to NBD", ratios("pages_per_s", ("nvme", 32), ("nbd", 32)), "at least 1.5")
    told("32 at a time: pages of a bare exchange to NBD", ratios("pages_per_s", ("bare", 32), ("nbd", 32)))


if __name__ == "__main__":
    main()
