#!/usr/bin/python3 -B
"""Measures 4 KiB random reads over NVMe/TCP on loopback, beside a bare exchange and beside NBD.

All ratios are taken within a round. Depth 1 is compared with a bare ping-pong (64 bytes there, 4
KiB back, over the same sockets with the same waiting). Target: at most 1.15 times its median time.
Depth 32 is compared with NBD in the clear. Target: at least 1.5 times its pages a second. A bare
exchange of 32 requests and 32 pages is the most that any protocol could reach. Build first:
    cargo build --release --workspace --examples

Usage: bench/nvme_pages.py [--rounds N] [--seconds S] [--json]
"""

import statistics
import subprocess

from common import bench
from common.bench import EXAMPLES, Failed, end

ADDRESS = "127.0.0.1:0"
SIZE = "64M"
# Kind and depth of each run.
RUNS = [("bare", 1), ("nvme", 1), ("nbd", 1), ("bare", 32), ("nbd", 32), ("nvme", 32)]


class Server:
    """One of the servers, with the address and the name that it prints once it serves."""

    def __init__(self, program: str, *arguments: str):
        self.process = subprocess.Popen(
            [EXAMPLES / program, ADDRESS, *arguments], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        words = self.process.stdout.readline().split()
        if words[:2] != ["listening", "on"]:
            end(self.process)
            raise Failed(f"{program} does not serve")
        self.address = words[2]
        self.name = words[4:]


def read(kind: str, depth: int, seconds: float, server: Server) -> dict:
    """Runs the load once."""
    command = [
        EXAMPLES / "page_reads", kind, server.address, str(depth), str(seconds), *server.name,
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rate, median = done.stdout.split()
    return {"pages_per_s": float(rate), "median_us": float(median)}


def ratios(samples: dict) -> dict:
    """Compares the kinds, round by round."""

    def of(field: str, these: str, those: str) -> dict:
        return bench.spread(a[field] / b[field] for a, b in zip(samples[these], samples[those]))

    return {
        "nvme_time_beside_bare_1": of("median_us", "nvme-1", "bare-1"),
        "nvme_pages_beside_nbd_32": of("pages_per_s", "nvme-32", "nbd-32"),
        "bare_pages_beside_nbd_32": of("pages_per_s", "bare-32", "nbd-32"),
    }


def report(result: dict) -> None:
    for run, samples in result["samples"].items():
        rate = statistics.median(sample["pages_per_s"] for sample in samples)
        median = statistics.median(sample["median_us"] for sample in samples)
        kind, depth = run.split("-")
        print(f"{f'{kind}, {depth} at a time':<50}{rate:10,.0f} pages/s, {median:8.2f} us")
    of = {name: bench.spread_text(ratio) for name, ratio in result["ratios"].items()}
    for text, name, target in (
        ("1 at a time: time of NVMe to a bare ping-pong", "nvme_time_beside_bare_1", 1.15),
        ("32 at a time: pages of NVMe to NBD", "nvme_pages_beside_nbd_32", 1.5),
        ("32 at a time: pages of a bare exchange to NBD", "bare_pages_beside_nbd_32", None),
    ):
        bound = "at most" if "time_" in name else "at least"
        print(f"{text:<50}{of[name]}" + (f"; target: {bound} {target}" if target else ""))


def main() -> None:
    parser = bench.arguments(__doc__, rounds=5)
    parser.add_argument("--seconds", type=float, default=3, help="of each run")
    args = bench.parse(parser)
    servers = {}
    samples: dict = {f"{kind}-{depth}": [] for kind, depth in RUNS}
    try:
        servers["bare"] = Server("ping_pong")
        servers["nbd"] = Server("nbd_memory", SIZE)
        servers["nvme"] = Server("nvme_memory", SIZE)
        for number in range(args.rounds):
            # Each round starts with another run.
            for at in range(len(RUNS)):
                kind, depth = RUNS[(at + number) % len(RUNS)]
                sample = read(kind, depth, args.seconds, servers[kind])
                samples[f"{kind}-{depth}"].append(sample)
    finally:
        for server in servers.values():
            end(server.process)
    bench.finish({"samples": samples, "ratios": ratios(samples)}, report)


if __name__ == "__main__":
    bench.start(main)
