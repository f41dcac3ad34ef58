#!/usr/bin/python3 -B
"""Measures 4 KiB random reads and writes over NBD on a Unix socket, beside nbdkit and nbd-server.

Each round runs the same fio job against every server in turn. The figures are medians over the
rounds. A run is repeated if other programs took more than a twentieth of the machine meanwhile. A
run that stays disturbed is marked.

Needs fio (with its nbd engine), nbdkit, nbd-server and nbdcopy. Build first:
    cargo build --release -p aquifer-cli

Usage: bench/nbd_pages.py [--rounds N] [--seconds S] [--size MIB] [--tries N] [--only NAME,...]
    [--json]
"""

import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from common import bench
from common.bench import AQUIFER, MIB, Failed, wait

JOBS = [(rw, depth) for rw in ("randread", "randwrite") for depth in (1, 32)]
# Share of the machine that other programs may take during a run.
QUIET = 0.05


def servers(work: Path, size: int) -> dict[str, list]:
    """Returns the command line of each server. Each listens on work/NAME.sock."""
    backing = work / "nbd-server.img"
    with open(backing, "wb") as file:
        file.truncate(size)
    # nbd-server always listens on TCP too, and does not accept port 0.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = work / "nbd-server.conf"
    config.write_text(
        f"[generic]\nunixsock = {work}/nbd-server.sock\nlistenaddr = 127.0.0.1\nport = {port}\n"
        f"allowlist = true\n[export]\nexportname = {backing}\nfilesize = {size}\n"
    )
    return {
        "aquifer": [
            AQUIFER, "serve", "export", "--size", str(size), "--nbd", f"unix:{work}/aquifer.sock",
        ],
        "nbdkit memory": bench.nbdkit_memory(f"{work}/nbdkit memory.sock", size),
        "nbd-server": ["nbd-server", "-C", str(config), "-p", f"{work}/nbd-server.pid"],
    }


def uri(work: Path, name: str) -> str:
    export = "export" if name == "nbd-server" else ""
    return f"nbd+unix:///{export}?socket={work}/{name}.sock".replace(" ", "%20")


def start(name: str, command: list, work: Path) -> tuple[int, subprocess.Popen]:
    """Starts a server. Returns, once it listens, its process id and the process started."""
    log = open(work / f"{name}.log", "wb")
    process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    # nbd-server always goes to the background (its -d serves one client only).
    daemonizes = name == "nbd-server"

    def listens() -> bool:
        if process.poll() is not None and not (daemonizes and process.returncode == 0):
            raise Failed(f"{name} has ended: {(work / f'{name}.log').read_text()}")
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(f"{work}/{name}.sock") == 0

    try:
        wait(f"{name} to listen", listens, 10)
    except BaseException:
        process.kill()
        raise
    return int((work / f"{name}.pid").read_text()) if daemonizes else process.pid, process


def fill(work: Path, name: str, size: int) -> None:
    """Stores data in every page, so that no server can answer with holes."""
    image = work / "fill.img"
    if not image.exists():
        block = os.urandom(MIB)
        with open(image, "wb") as file:
            for _ in range(size // MIB):
                file.write(block)
    subprocess.run(["nbdcopy", "--allocated", str(image), uri(work, name)], check=True)


def fio(work: Path, name: str, size: int, rw: str, depth: int, seconds: float) -> tuple:
    """Returns the operations a second and the median latency in microseconds."""
    command = [
        "fio", "--name=job", "--ioengine=nbd", f"--uri={uri(work, name)}", f"--rw={rw}", "--bs=4k",
        f"--iodepth={depth}", f"--size={size}", "--time_based", f"--runtime={seconds}",
        "--ramp_time=0.3", "--randrepeat=0", "--norandommap", "--output-format=json",
    ]
    run = subprocess.run(command, capture_output=True, text=True, cwd=work)
    if run.returncode != 0:
        raise Failed(f"fio against {name} failed:\n{run.stdout}{run.stderr}")
    # fio's nbd engine prints a line before the JSON.
    job = json.loads(run.stdout[run.stdout.index("{"):])["jobs"][0]
    side = job["read" if rw == "randread" else "write"]
    return side["iops"], side["clat_ns"]["percentile"]["50.000000"] / 1000


def processor_seconds() -> tuple[float, float]:
    """Returns the CPU time of all programs so far, and that of this script and the servers."""
    tick = os.sysconf("SC_CLK_TCK")
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle, waiting = fields[3:5]
    ours = os.times()
    total = ours.user + ours.system + ours.children_user + ours.children_system
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().rsplit(")", 1)
        except OSError:
            continue
        if any(server in name for server in ("aquifer", "nbdkit", "nbd-server")):
            # nbd-server serves each client in a child, whose time counts once the child has ended.
            total += sum(int(field) for field in rest.split()[11:15]) / tick
    return (sum(fields) - idle - waiting) / tick, total


def wait_for_quiet() -> None:
    """Waits until the machine is nearly idle, for 10 s at most."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        before = processor_seconds()[0]
        time.sleep(0.2)
        if processor_seconds()[0] - before <= 0.2 * QUIET * os.cpu_count() + 0.01:
            return


def measure(
    work: Path, name: str, size: int, rw: str, depth: int, seconds: float, tries: int
) -> dict:
    """Runs the job until it has the machine to itself, or `tries` times."""
    for _ in range(tries):
        wait_for_quiet()
        before = processor_seconds()
        began = time.monotonic()
        iops, latency = fio(work, name, size, rw, depth, seconds)
        after = processor_seconds()
        others = (after[0] - before[0]) - (after[1] - before[1])
        share = max(0.0, others / ((time.monotonic() - began) * os.cpu_count()))
        if share <= QUIET:
            break
    return {"iops": iops, "latency_us": latency, "others": round(share, 3)}


def report(results: dict) -> None:
    names = list(results)
    ratio = f"{'ratio to best peer':>20}" if len(names) > 1 and "aquifer" in names else ""
    print(f"{'job':<16}" + "".join(f"{name + ' IOPS (spread)':>32}" for name in names) + ratio)
    for rw, depth in JOBS:
        line = f"{rw + ' ' + str(depth):<16}"
        median = {}
        for name in names:
            samples = results[name][f"{rw}-{depth}"]
            iops = [sample["iops"] for sample in samples]
            median[name] = statistics.median(iops)
            spread = (max(iops) - min(iops)) / median[name]
            latency = statistics.median(sample["latency_us"] for sample in samples)
            mark = "*" if any(sample["others"] > QUIET for sample in samples) else ""
            line += f"{f'{median[name]:,.0f} ({spread:.0%}) {latency:.0f} us{mark}':>32}"
        if ratio:
            best = max(value for name, value in median.items() if name != "aquifer")
            line += f"{median['aquifer'] / best:>20.2f}"
        print(line)
    jobs = [job for of in results.values() for job in of.values()]
    if any(sample["others"] > QUIET for job in jobs for sample in job):
        print("* other programs used the machine meanwhile")


def main() -> None:
    parser = bench.arguments(__doc__, rounds=5)
    parser.add_argument("--seconds", type=float, default=3, help="of each run")
    parser.add_argument("--size", type=int, default=512, help="MiB served")
    parser.add_argument("--tries", type=int, default=5, help="runs at most, if disturbed")
    parser.add_argument("--only", help="these servers only, separated by commas")
    args = bench.parse(parser)
    size = args.size * MIB
    bench.require("fio", "nbdkit", "nbd-server", "nbdcopy")

    with tempfile.TemporaryDirectory(prefix="aquifer-bench-", dir="/dev/shm") as directory:
        work = Path(directory)
        commands = servers(work, size)
        names = args.only.split(",") if args.only else list(commands)
        started = []
        try:
            for name in names:
                started.append(start(name, commands[name], work))
                fill(work, name, size)
            results = {name: {f"{rw}-{depth}": [] for rw, depth in JOBS} for name in names}
            for number in range(args.rounds):
                for rw, depth in JOBS:
                    # Each round starts with another server.
                    for at in range(len(names)):
                        name = names[(at + number) % len(names)]
                        sample = measure(work, name, size, rw, depth, args.seconds, args.tries)
                        results[name][f"{rw}-{depth}"].append(sample)
        finally:
            for pid, _ in started:
                os.kill(pid, signal.SIGTERM)
            for _, process in started:
                process.wait()
    bench.finish(results, report)


if __name__ == "__main__":
    bench.start(main)
