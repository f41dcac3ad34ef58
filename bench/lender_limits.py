#!/usr/bin/python3 -B
"""Measures the reads of a modest borrower beside a greedy one, without and with limits.

Each round serves an export three times, in another order: without limits, with a limit for each
host, and with one for each device. A greedy client, fio, reads with many requests in flight over
several connections. A modest one has a device of its own, and reads a page every 5 ms. The script
reports the modest client's times for a read, its reads a second, and the rate of the greedy one. A
run without the greedy client is the base.

The greedy client is at a TCP address, and the modest one at a unix socket, so that the lender takes
them for two hosts. Needs fio (with its nbd engine) and python3-libnbd. Build first:
    cargo build --release -p aquifer-cli

Usage: bench/lender_limits.py [--rounds N] [--seconds S] [--limit SIZE] [--json]
"""

import json
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from common import bench
from common.bench import AQUIFER, MIB, PYTHON, Failed

SIZE = 64 * MIB
# Connections of the greedy client, and requests in flight on each.
CONNECTIONS, DEPTH = 8, 32
LENGTH = 64 * 1024
# Reads of the modest client a second.
RATE = 200

# Reads a page at a time at a rate; prints the time of each in microseconds.
MODEST = """
import sys, time, nbd
uri, seconds, rate, size = sys.argv[1], *map(float, sys.argv[2:])
handle = nbd.NBD()
handle.connect_uri(uri)
print("ready", flush=True)
sys.stdin.readline()
times, at, begin = [], 0, time.monotonic()
due = begin
while due < begin + seconds:
    time.sleep(max(0, due - time.monotonic()))
    before = time.monotonic()
    handle.pread(4096, at)
    times.append((time.monotonic() - before) * 1e6)
    at = (at + 4096 * 97) % int(size)
    # A late read delays those after it, as a program's page faults would.
    due = max(due + 1 / rate, time.monotonic())
print(*times, flush=True)
"""


class Client:
    """A client program."""

    def __init__(self, program: str, *words):
        command = [PYTHON, "-c", program, *map(str, words)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self.process.stdout.readline() != "ready\n":
            raise Failed("a client did not start")

    def go(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def answer(self) -> list[float]:
        line = self.process.stdout.readline()
        bench.end(self.process)
        return [float(word) for word in line.split()]


def measure(limits: list, greedy: bool, seconds: float) -> dict:
    with tempfile.TemporaryDirectory(prefix="aquifer-bench-", dir="/dev/shm") as work:
        command = [
            AQUIFER, "--json", "--run-dir", work, "serve", "export", "--size", SIZE,
            "--name", "greedy", "--name", "modest", "--nbd", "127.0.0.1:0",
            "--nbd", f"unix:{work}/modest.sock", *limits,
        ]
        server = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
        try:
            ready = server.stdout.readline()
            if not ready:
                raise Failed("the export did not start")
            uris = json.loads(ready)["uris"]
            at_tcp = next(uri for uri in uris if uri.endswith("/greedy"))
            at_socket = next(uri for uri in uris if uri.startswith("nbd+unix:///modest?"))
            fill(at_tcp)
            fill(at_socket)
            modest = Client(MODEST, at_socket, seconds, RATE, SIZE)
            crowd = start_greedy(Path(work), at_tcp) if greedy else None
            began = time.monotonic()
            modest.go()
            times = sorted(modest.answer())
            took = time.monotonic() - began
            taken = bytes_per_s(crowd) if crowd else 0.0
        finally:
            bench.end(server)
    return {
        "p50_us": times[len(times) // 2],
        "p99_us": times[len(times) * 99 // 100],
        "longest_us": times[-1],
        "reads_per_s": len(times) / took,
        "greedy_mib_per_s": taken / MIB,
    }


def start_greedy(work: Path, uri: str) -> subprocess.Popen:
    """Starts fio, which reads until it is told to end, and waits until it reads."""
    command = [
        "fio", "--name=greedy", "--ioengine=nbd", f"--uri={uri}", "--rw=randread", f"--bs={LENGTH}",
        f"--iodepth={DEPTH}", f"--numjobs={CONNECTIONS}", f"--size={SIZE}", "--time_based",
        "--runtime=600", "--thread", "--group_reporting", "--output-format=json",
        f"--output={work}/fio.json", "--norandommap",
    ]
    fio = subprocess.Popen(command, cwd=work, stdout=subprocess.DEVNULL)
    time.sleep(1)
    return fio


def bytes_per_s(fio: subprocess.Popen) -> float:
    """Ends fio, and returns the rate of its reads."""
    fio.send_signal(signal.SIGINT)
    fio.wait()
    text = Path(fio.args[-2].split("=")[1]).read_text()
    # fio's nbd engine prints a line before the JSON.
    return json.loads(text[text.index("{"):])["jobs"][0]["read"]["bw_bytes"]


def fill(uri: str) -> None:
    """Stores data in every page, so that the server cannot answer with holes."""
    program = "import nbd, os, sys\nh = nbd.NBD()\nh.connect_uri(sys.argv[1])\n" \
        f"data = os.urandom({MIB})\n" \
        f"for at in range(0, {SIZE}, {MIB}): h.pwrite(data, at)"
    subprocess.run([PYTHON, "-c", program, uri], check=True)


def report(results: dict) -> None:
    print(f"{'limits':<10}{'p50 us':>20}{'p99 us':>28}{'reads/s':>18}{'greedy MiB/s':>28}")
    for name, rounds in results.items():
        line = f"{name:<10}"
        columns = [("p50_us", 20), ("p99_us", 28), ("reads_per_s", 18), ("greedy_mib_per_s", 28)]
        for column, width in columns:
            values = [one[column] for one in rounds]
            text = f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"
            line += f"{text:>{width}}"
        print(line)


def main() -> None:
    parser = bench.arguments(__doc__, rounds=5)
    parser.add_argument("--seconds", type=float, default=3, help="of each run")
    parser.add_argument("--limit", default="100M", help="bytes a second of a host, or of a device")
    args = bench.parse(parser)
    bench.require("fio")
    kinds = {
        "alone": ([], False),
        "none": ([], True),
        "by host": (["--host-bytes", args.limit], True),
        "by lease": (["--lease-bytes", args.limit], True),
    }
    results = {name: [] for name in kinds}
    names = list(kinds)
    for number in range(args.rounds):
        # Each round starts with another kind.
        for at in range(len(names)):
            name = names[(at + number) % len(names)]
            results[name].append(measure(*kinds[name], args.seconds))
    bench.finish(results, report)


if __name__ == "__main__":
    bench.start(main)
