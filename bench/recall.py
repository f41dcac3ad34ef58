#!/usr/bin/env python3
"""How long a lender that is overloaded while it lends waits for its memory (mem_len_fin under load).

Three real agents, each with a memory control group as its machine and an address of its own on loopback. A borrows, and a
program there swaps checked content to B and goes on rewriting it. Then a program on B needs B's memory: B asks for it back, and A
moves it, in turn, to another lender and (where nobody has room) to its own spill file, while its program goes on. Each round
measures from the message to the last page freed, and has every byte of both programs checked. Needs root and swap:
    cargo build --release -p aquifer-cli

Usage: lab/recall [--rounds N] [--lease 1G] [--protocol nbd|nvme-tcp] [--json]
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AQUIFER = Path(os.environ.get("AQUIFER", ROOT / "target/release/aquifer"))
MIB = 1 << 20
ADDRESSES = {"a": "127.77.0.1", "b": "127.77.0.2", "c": "127.77.0.3"}
V1 = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists()
CGROUPS = Path("/sys/fs/cgroup/memory" if V1 else "/sys/fs/cgroup")


class Host:
    """An agent, and the control group that is its machine."""

    def __init__(self, name: str, peers: list[str], memory: int, work: Path, protocol: str):
        self.name, self.socket = name, work / name / "agent.sock"
        self.group = CGROUPS / f"aquifer-lab-{os.getpid()}-{name}"
        self.group.mkdir()
        (self.group / ("memory.limit_in_bytes" if V1 else "memory.max")).write_text(str(memory))
        address, state = ADDRESSES[name], work / name
        config = work / f"{name}.toml"
        nvme = f'nvme = "{address}:4420"' if protocol != "nbd" else ""
        config.write_text(
            f'host = "{name}"\nlisten = "{address}:7070"\npages = "{address}:7071"\nsocket = "{self.socket}"\n'
            f'state = "{state}"\nstore = "/dev/shm/{work.name}/{name}"\ntls = "{work}/cluster/{name}/tls"\n'
            f'[memory]\ncgroup = "{self.group}"\ngate_swap = true\nperiod = "200ms"\npressure = 0.0\n'
            f"[lend]\n{nvme}\n"
            f'[borrow]\nenabled = false\npriority = 32000\nspill = "{work}/spill"\nprotocol = "{protocol}"\n'
            + "".join(f'[[peer]]\nname = "{peer}"\naddress = "{ADDRESSES[peer]}:7070"\n' for peer in peers if peer != name)
        )
        self.log = open(work / f"{name}.log", "w")
        self.agent = subprocess.Popen([AQUIFER, "agent", "--config", config], stderr=self.log, stdout=self.log)
        wait_until(f"the agent of {name}", lambda: self.status() is not None)

    def status(self):
        """What the agent says of itself; nothing if it does not answer."""
        done = subprocess.run([AQUIFER, "status", "--json", "--socket", self.socket], capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def borrow(self, size: int):
        run(AQUIFER, "borrow", str(size), "--socket", self.socket)

    def load(self, size: int):
        return Load(self.group, size)

    def stop(self):
        self.agent.send_signal(signal.SIGINT)
        self.agent.wait()
        wait_until(f"the end of what runs on {self.name}", lambda: not (self.group / "cgroup.procs").read_text())
        self.group.rmdir()


class Load:
    """A program that holds checked content."""

    def __init__(self, group: Path, size: int):
        self.process = subprocess.Popen(
            [AQUIFER, "load", "--hold", "--bytes", str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            preexec_fn=lambda: (group / "cgroup.procs").write_text("0"),
        )
        self.pages = size // 4096

    def wait_for(self, event: str) -> dict:
        for line in self.process.stdout:
            if event in (said := json.loads(line)).get("event", ""):
                return said
        raise SystemExit(f"lab/recall: a program ended before it had {event}")

    def order(self, word: str):
        print(word, file=self.process.stdin, flush=True)

    def verify(self):
        self.order("verify")
        verdict = self.wait_for("verified")
        if verdict["pages_lost"] or verdict["pages_verified"] != self.pages:
            raise SystemExit(f"lab/recall: content was lost: {verdict}")

    def stop(self):
        self.process.kill()
        self.process.wait()


def run(*command) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"lab/recall: {command}: {done.stderr}")
    return done.stdout


def wait_until(what: str, condition, timeout: float = 120):
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"lab/recall: {what} did not come within {timeout} s")
        time.sleep(0.02)


def measure(where: str, lease: int, protocol: str) -> dict:
    """One recall of all that is stored in a lease."""
    names = ["a", "b", "c"] if where == "lender" else ["a", "b"]
    with tempfile.TemporaryDirectory(prefix="aquifer-lab-") as place:
        work, hosts, loads = Path(place), {}, []
        init = [part for name in names for part in ("--host", name, "--address", ADDRESSES[name])]
        run(AQUIFER, "init", "--dir", work / "cluster", *init)
        try:
            # c comes when b has lent: a borrows from whoever can spare most.
            for name in ("a", "b"):
                hosts[name] = Host(name, names, lease // 4 if name == "a" else lease * 5 // 2, work, protocol)
            a, b = hosts["a"], hosts["b"]
            a.borrow(lease)
            loads.append(a.load(lease + lease // 16))
            loads[0].wait_for("filled")
            if where == "lender":
                hosts["c"] = Host("c", names, lease * 5 // 2, work, protocol)
            loads.append(b.load(lease * 3 // 2))
            asked = stored = None
            loads[0].order("rewrite")
            while (lent := b.status()["lent"]) or asked is None:
                if lent and lent[0]["state"] == "asked back" and asked is None:
                    asked, stored = time.monotonic(), lent[0]["stored"]
            took = time.monotonic() - asked
            for load in loads:
                load.wait_for("filled")
                load.verify()
            [volume] = a.status()["borrowed"]
            spilled = volume["spilled"] > 0
            if spilled != (where == "spill"):
                raise SystemExit(f"lab/recall: it did not go to the {where}: {volume}")
            return {"where": where, "stored": stored, "seconds": took, "seconds_per_gib": took * (1 << 30) / stored}
        finally:
            for load in loads:
                load.stop()
            for host in hosts.values():
                host.stop()
            run("rm", "-rf", f"/dev/shm/{work.name}")


def size(text: str) -> int:
    return int(text.rstrip("MGiB")) << (30 if "G" in text else 20)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lease", type=size, default="1G")
    parser.add_argument("--protocol", choices=["nbd", "nvme-tcp"], default="nbd")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    for number in range(arguments.rounds):
        for where in ("lender", "spill"):
            results.append(measure(where, arguments.lease, arguments.protocol))
            last = results[-1]
            print(f"round {number + 1}: to the {where}: {last['stored'] / MIB:.0f} MiB in {last['seconds']:.2f} s", file=sys.stderr)
    if arguments.json:
        print(json.dumps(results))
        return
    print(f"{'moves to':20} {'s a GiB':>8} {'(lowest-highest)':>18}")
    for where, name in (("lender", "another lender"), ("spill", "a local file")):
        times = [result["seconds_per_gib"] for result in results if result["where"] == where]
        spread = f"({min(times):.2f}-{max(times):.2f})"
        print(f"{name:20} {statistics.median(times):8.2f} {spread:>18}")


if __name__ == "__main__":
    main()
