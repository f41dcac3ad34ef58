#!/usr/bin/env python3
"""4 KiB random reads and writes over NBD on a unix socket: Aquifer beside nbdkit and nbd-server.

Each round runs the same fio job against every server in turn; figures are medians over the rounds. A run during which
other programs took more than a twentieth of the machine is repeated, some times; what stays disturbed is marked. Needs fio (with its nbd engine), nbdkit, nbd-server and nbdcopy:
    apt-get install fio nbdkit nbd-server libnbd-bin

Usage: lab/nbd [--rounds N] [--seconds S] [--size MIB] [--tries N] [--only NAME,...] [--json]
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# How to start ours; {socket} and {size} are filled in. Set AQUIFER_EXPORT to measure another build.
OURS = os.environ.get("AQUIFER_EXPORT", f"{ROOT}/target/release/aquifer export {{size}} --nbd unix:{{socket}}")
JOBS = [(rw, depth) for rw in ("randread", "randwrite") for depth in (1, 32)]
MIB = 1 << 20
# Share of the machine that other programs may take during a run.
QUIET = 0.05


def servers(work: Path, size: int) -> dict[str, list[str]]:
    """The command line of each server; each is to listen on work/NAME.sock."""
    backing = work / "nbd-server.img"
    with open(backing, "wb") as file:
        file.truncate(size)
    # It listens on TCP too, whether one wants it or not, and dies of port 0.
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = work / "nbd-server.conf"
    config.write_text(
        f"[generic]\nunixsock = {work}/nbd-server.sock\nlistenaddr = 127.0.0.1\nport = {port}\nallowlist = true\n"
        f"[export]\nexportname = {backing}\nfilesize = {size}\n"
    )
    ours = [part.format(socket=f"{work}/aquifer.sock", size=size) for part in OURS.split()]
    return {
        "aquifer": ours,
        "nbdkit memory": ["nbdkit", "-f", "-U", f"{work}/nbdkit memory.sock", "memory", f"{size}"],
        "nbd-server": ["nbd-server", "-C", str(config), "-p", f"{work}/nbd-server.pid"],
    }


def uri(work: Path, name: str) -> str:
    export = "export" if name == "nbd-server" else ""
    return f"nbd+unix:///{export}?socket={work}/{name}.sock".replace(" ", "%20")


def start(name: str, command: list[str], work: Path) -> tuple[int, subprocess.Popen]:
    """Starts a server, waits until it listens, and returns its process id and the process that was started."""
    log = open(work / f"{name}.log", "wb")
    process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    # nbd-server always goes to the background (its -d serves one client only).
    goes_away = name == "nbd-server"
    deadline = time.monotonic() + 10
    while True:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(f"{work}/{name}.sock")
                break
            except OSError:
                gone = process.poll() is not None and not (goes_away and process.returncode == 0)
                if gone or time.monotonic() > deadline:
                    process.kill()
                    sys.exit(f"{name} does not listen: {(work / f'{name}.log').read_text()}")
        time.sleep(0.02)

    return int((work / f"{name}.pid").read_text()) if goes_away else process.pid, process


def fill(work: Path, name: str, size: int) -> None:
    """Stores something in every page, so that no server can answer with holes."""
    image = work / "fill.img"
    if not image.exists():
        block = os.urandom(MIB)
        with open(image, "wb") as file:
            for _ in range(size // MIB):
                file.write(block)
    subprocess.run(["nbdcopy", "--allocated", str(image), uri(work, name)], check=True)


def fio(work: Path, name: str, size: int, rw: str, depth: int, seconds: float) -> tuple[float, float]:
    """Operations a second and the median latency in microseconds."""
    command = [
        "fio", "--name=job", "--ioengine=nbd", f"--uri={uri(work, name)}", f"--rw={rw}", "--bs=4k",
        f"--iodepth={depth}", f"--size={size}", "--time_based", f"--runtime={seconds}", "--ramp_time=0.3",
        "--randrepeat=0", "--norandommap", "--output-format=json",
    ]
    run = subprocess.run(command, capture_output=True, text=True, cwd=work)
    if run.returncode != 0:
        sys.exit(f"fio against {name} failed:\n{run.stdout}{run.stderr}")
    # fio's nbd engine prints a line before the JSON.
    job = json.loads(run.stdout[run.stdout.index("{"):])["jobs"][0]
    side = job["read" if rw == "randread" else "write"]
    return side["iops"], side["clat_ns"]["percentile"]["50.000000"] / 1000


def processor_seconds() -> tuple[float, float]:
    """What all programs have used so far, and of that what this script's and the servers' processes have."""
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
        if any(server in name for server in ("nbd_memory", "aquifer", "nbdkit", "nbd-server")):
            # nbd-server serves each client in a child, whose time counts for it once the child has ended.
            total += sum(int(field) for field in rest.split()[11:15]) / tick
    return (sum(fields) - idle - waiting) / tick, total


def wait_for_quiet() -> None:
    """Waits, but not for ever, until nothing much runs."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        before = processor_seconds()[0]
        time.sleep(0.2)
        if processor_seconds()[0] - before <= 0.2 * QUIET * os.cpu_count() + 0.01:
            return


def measure(work: Path, name: str, size: int, rw: str, depth: int, seconds: float, tries: int) -> dict:
    """Runs the job until it has the machine to itself, or it has been tried often enough."""
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


def spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def report(results: dict, names: list[str]) -> None:
    ratio = f"{'ratio to best peer':>20}" if len(names) > 1 and "aquifer" in names else ""
    print(f"{'job':<16}" + "".join(f"{name + ' IOPS (spread)':>32}" for name in names) + ratio)
    for rw, depth in JOBS:
        line = f"{rw + ' ' + str(depth):<16}"
        median = {}
        for name in names:
            samples = results[name][rw, depth]
            iops = [sample["iops"] for sample in samples]
            median[name] = statistics.median(iops)
            latency = statistics.median(sample["latency_us"] for sample in samples)
            mark = "*" if any(sample["others"] > QUIET for sample in samples) else ""
            line += f"{f'{median[name]:,.0f} ({spread(iops):.0%}) {latency:.0f} us{mark}':>32}"
        if ratio:
            best = max(value for name, value in median.items() if name != "aquifer")
            line += f"{median['aquifer'] / best:>20.2f}"
        print(line)
    if any(sample["others"] > QUIET for jobs in results.values() for job in jobs.values() for sample in job):
        print("* other programs used the machine meanwhile")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--size", type=int, default=512, help="MiB served")
    parser.add_argument("--tries", type=int, default=5, help="how often to repeat a run that was disturbed")
    parser.add_argument("--only", help="these servers only, separated by commas")
    parser.add_argument("--json", action="store_true", help="one JSON object with all samples")
    args = parser.parse_args()
    # However it ends, the servers are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    size = args.size * MIB
    for tool in ("fio", "nbdkit", "nbd-server", "nbdcopy"):
        if not shutil.which(tool):
            sys.exit(f"{tool} is missing; apt-get install fio nbdkit nbd-server libnbd-bin")

    with tempfile.TemporaryDirectory(prefix="aquifer-lab-", dir="/dev/shm") as directory:
        work = Path(directory)
        commands = servers(work, size)
        names = args.only.split(",") if args.only else list(commands)
        started = []
        try:
            for name in names:
                started.append(start(name, commands[name], work))
                fill(work, name, size)
            results = {name: {job: [] for job in JOBS} for name in names}
            for round_number in range(args.rounds):
                for rw, depth in JOBS:
                    # Nobody always comes first.
                    for at in range(len(names)):
                        name = names[(at + round_number) % len(names)]
                        results[name][rw, depth].append(measure(work, name, size, rw, depth, args.seconds, args.tries))
        finally:
            for pid, _ in started:
                os.kill(pid, signal.SIGTERM)
            for _, process in started:
                process.wait()
    if args.json:
        samples = {name: {f"{rw}-{depth}": s for (rw, depth), s in jobs.items()} for name, jobs in results.items()}
        print(json.dumps(samples))
    else:
        report(results, names)


if __name__ == "__main__":
    main()
