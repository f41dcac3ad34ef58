#!/usr/bin/python3 -B
"""Measures the CPU time that an idle lender of 4 GiB uses over 10 s.

Two lenders: `aquifer serve export` with one connected client, and an agent that has lent 4 GiB to
another agent. The CPU time comes from /proc/PID/stat. Needs root and Debian's python3-libnbd. Build
first:
    cargo build --release -p aquifer-cli

Usage: bench/idle_cpu.py [--rounds N] [--json]
"""

import json
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from common import bench
from common.bench import AQUIFER, PYTHON, cpu_seconds, end, run

SECONDS = 10
ADDRESSES = {"a": "127.77.0.1", "b": "127.77.0.2"}


def idle(pid: int) -> float:
    """Returns the CPU seconds that a process uses in the next 10 s."""
    stat = Path(f"/proc/{pid}/stat")
    before = cpu_seconds(stat)
    time.sleep(SECONDS)
    return cpu_seconds(stat) - before


def export(directory: str) -> float:
    listen = ["--nbd", f"unix:{directory}/nbd.sock"]
    command = [AQUIFER, "--json", "serve", "export", "--size", "4G", *listen]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            uri = json.loads(server.stdout.readline())["uri"]
            run(PYTHON, "-m", "nbd", "-u", uri, "-c", "h.pwrite(b'x' * 4096, 0)")
            hold = "import time; h.pread(4096, 0); time.sleep(60)"
            client = subprocess.Popen([PYTHON, "-m", "nbd", "-u", uri, "-c", hold])
            try:
                time.sleep(1)
                return idle(server.pid)
            finally:
                end(client)
        finally:
            server.send_signal(signal.SIGTERM)


def agents(directory: str) -> float:
    hosts = [
        word for host, address in ADDRESSES.items()
        for word in ("--host", host, "--address", address)
    ]
    run(AQUIFER, "cluster", "init", "--dir", f"{directory}/c", "--cluster", "bench", *hosts)
    running = []
    try:
        for host, peer in (("a", "b"), ("b", "a")):
            address = ADDRESSES[host]
            config = Path(f"{directory}/{host}.toml")
            config.write_text(f"""host = "{host}"
listen = "{address}:7070"
pages = "{address}:7071"
tls = "{directory}/c/{host}/tls"
socket = "{directory}/{host}/agent.sock"
state = "{directory}/{host}"
store = "/dev/shm/aquifer/bench-idle-{host}"
[borrow]
spill = "{directory}/{host}/spill"
[[peer]]
name = "{peer}"
address = "{ADDRESSES[peer]}:7070"
""")
            log = open(f"{directory}/{host}.log", "w")
            agent = subprocess.Popen([AQUIFER, "serve", "agent", "--config", config], stderr=log)
            running.append(agent)
        socket = ["--socket", f"{directory}/a/agent.sock"]
        time.sleep(2)
        run(AQUIFER, "host", "borrow", "--size", "4G", *socket)
        time.sleep(3)
        used = idle(running[1].pid)
        run(AQUIFER, "host", "return", *socket)
        return used
    finally:
        for agent in running:
            agent.send_signal(signal.SIGINT)
        for agent in running:
            agent.wait(20)
        for host in "ab":
            shutil.rmtree(f"/dev/shm/aquifer/bench-idle-{host}", ignore_errors=True)


def measure() -> dict:
    with tempfile.TemporaryDirectory(prefix="aquifer-bench-") as directory:
        return {"export_cpu_s": export(directory), "agent_cpu_s": agents(directory)}


def report(result: dict) -> None:
    for of in result["rounds"]:
        for key, name in (
            ("export_cpu_s", "export of 4 GiB, one client connected"),
            ("agent_cpu_s", "agent that has lent 4 GiB, volume connected"),
        ):
            share = 100 * of[key] / result["seconds"]
            print(f"{name:45} {of[key]:6.2f} s of {result['seconds']} s = {share:.1f} %")


def main() -> None:
    args = bench.parse(bench.arguments(__doc__, rounds=1))
    rounds = [measure() for _ in range(args.rounds)]
    bench.finish({"seconds": SECONDS, "rounds": rounds}, report)


if __name__ == "__main__":
    bench.start(main)
