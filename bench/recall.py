#!/usr/bin/python3 -B
"""Measures how long an overloaded lender waits for its memory (mem_len_fin under load).

Three real agents run, each with a memory cgroup as its machine and an address of its own on
loopback. A borrows, and a program there swaps checked content to B and goes on rewriting it. Then a
program on B needs B's memory, and B asks for it back. A moves it while its program goes on: to
another lender, or, where no other host has room, to its own spill file. Each round measures from
the message to the last page freed, and checks every byte of both programs. Target: 10 s a GiB.
Needs root and swap. Build first:
    cargo build --release -p aquifer-cli

Usage: bench/recall.py [--rounds N] [--lease 1G] [--protocol nbd|nvme-tcp] [--json]
"""

import json
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from common import bench
from common.bench import AQUIFER, GIB, MIB, PAGE, Failed, MemoryCgroup, end, note, run, wait

ADDRESSES = {"a": "127.77.0.1", "b": "127.77.0.2", "c": "127.77.0.3"}
PLACES = {"lender": "another lender", "spill": "a local file"}
TIMEOUT = 120


class Host:
    """An agent, and the cgroup that is its machine."""

    def __init__(self, name: str, peers: list[str], memory: int, work: Path, protocol: str):
        self.name, self.socket = name, work / name / "agent.sock"
        self.cgroup = MemoryCgroup(name, memory)
        address, state = ADDRESSES[name], work / name
        config = work / f"{name}.toml"
        nvme = f'nvme = "{address}:4420"' if protocol != "nbd" else ""
        config.write_text(
            f'host = "{name}"\nlisten = "{address}:7070"\npages = "{address}:7071"\n'
            f'socket = "{self.socket}"\nstate = "{state}"\n'
            f'store = "/dev/shm/{work.name}/{name}"\ntls = "{work}/cluster/{name}/tls"\n'
            f'[memory]\ncgroup = "{self.cgroup.path}"\ngate_swap = true\nperiod = "200ms"\n'
            f"pressure = 0.0\n[lend]\n{nvme}\n"
            f'[borrow]\nenabled = false\npriority = 32000\nspill = "{work}/spill"\n'
            f'protocol = "{protocol}"\n'
            + "".join(
                f'[[peer]]\nname = "{peer}"\naddress = "{ADDRESSES[peer]}:7070"\n'
                for peer in peers if peer != name
            )
        )
        self.log = open(work / f"{name}.log", "w")
        command = [AQUIFER, "serve", "agent", "--config", config]
        self.agent = subprocess.Popen(command, stderr=self.log, stdout=self.log)
        try:
            wait(f"the agent of {name}", lambda: self.status() is not None, TIMEOUT)
        except BaseException:
            self.stop()
            raise

    def status(self):
        """Returns the agent's status, or None if it does not answer."""
        command = [AQUIFER, "status", "--json", "--socket", self.socket]
        done = subprocess.run(command, capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def borrow(self, size: int) -> None:
        run(AQUIFER, "host", "borrow", "--size", size, "--socket", self.socket)

    def load(self, size: int) -> "Load":
        return Load(self.cgroup, size)

    def stop(self) -> None:
        self.agent.send_signal(signal.SIGINT)
        self.agent.wait()
        wait(f"the processes on {self.name} to end", self.cgroup.is_empty, TIMEOUT)
        self.cgroup.remove()


class Load:
    """A program that holds checked content."""

    def __init__(self, cgroup: MemoryCgroup, size: int):
        self.process = subprocess.Popen(
            [AQUIFER, "load", "--hold", "--bytes", str(size)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, preexec_fn=cgroup.enter,
        )
        self.pages = size // PAGE

    def wait_for(self, event: str) -> dict:
        for line in self.process.stdout:
            said = json.loads(line)
            if event in said.get("event", ""):
                return said
        raise Failed(f"a program ended before it reported '{event}'")

    def order(self, word: str) -> None:
        print(word, file=self.process.stdin, flush=True)

    def verify(self) -> None:
        self.order("verify")
        verdict = self.wait_for("verified")
        if verdict["pages_lost"] or verdict["pages_verified"] != self.pages:
            raise Failed(f"content was lost: {verdict}")

    def stop(self) -> None:
        end(self.process)


class Cluster:
    """Hosts and loads in a scratch directory. All of it ends with the block that uses it."""

    def __init__(self, names: list[str], protocol: str):
        self.names, self.protocol = names, protocol
        self.hosts: dict = {}
        self.loads: list = []

    def __enter__(self) -> "Cluster":
        self.directory = tempfile.TemporaryDirectory(prefix="aquifer-bench-")
        self.work = Path(self.directory.name)
        words = [
            word for name in self.names
            for word in ("--host", name, "--address", ADDRESSES[name])
        ]
        run(AQUIFER, "cluster", "init", "--dir", self.work / "cluster", *words)
        return self

    def start(self, name: str, memory: int) -> Host:
        self.hosts[name] = Host(name, self.names, memory, self.work, self.protocol)
        return self.hosts[name]

    def load(self, host: Host, size: int) -> Load:
        self.loads.append(host.load(size))
        return self.loads[-1]

    def stop(self, name: str) -> None:
        self.hosts.pop(name).stop()

    def __exit__(self, *_) -> None:
        for load in self.loads:
            load.stop()
        for host in self.hosts.values():
            host.stop()
        shutil.rmtree(f"/dev/shm/{self.work.name}", ignore_errors=True)
        self.directory.cleanup()


def check_place(borrower: Host, where: str) -> None:
    """Fails unless the borrower's pages went to the expected place."""
    [volume] = borrower.status()["borrowed"]
    if (volume["spilled"] > 0) != (where == "spill"):
        raise Failed(f"the pages did not go to {PLACES[where]}: {volume}")


def measure(where: str, lease: int, protocol: str) -> dict:
    """Recalls all that is stored in a lease, once."""
    names = ["a", "b", "c"] if where == "lender" else ["a", "b"]
    with Cluster(names, protocol) as cluster:
        # c starts after b has lent: a borrows from the host that can spare most.
        a = cluster.start("a", lease // 4)
        b = cluster.start("b", lease * 5 // 2)
        a.borrow(lease)
        first = cluster.load(a, lease + lease // 16)
        first.wait_for("filled")
        if where == "lender":
            cluster.start("c", lease * 5 // 2)
        cluster.load(b, lease * 3 // 2)
        asked = stored = None
        first.order("rewrite")
        while (lent := b.status()["lent"]) or asked is None:
            if lent and lent[0]["state"] == "asked back" and asked is None:
                asked, stored = time.monotonic(), lent[0]["stored"]
        took = time.monotonic() - asked
        for load in cluster.loads:
            load.wait_for("filled")
            load.verify()
        check_place(a, where)
        return {"stored": stored, "seconds": took, "seconds_per_gib": took * GIB / stored}


def report(result: dict) -> None:
    print(f"{'moves to':20} s a GiB, median (lowest to highest)")
    for where, runs in result.items():
        times = bench.spread(one["seconds_per_gib"] for one in runs)
        print(f"{PLACES[where]:20} {bench.spread_text(times)}")


def main_of(doc: str, measured) -> None:
    """Runs rounds of `measured`, to each place in turn; shared with drain.py."""
    parser = bench.arguments(doc, rounds=3)
    parser.add_argument("--lease", type=bench.size, default="1G")
    parser.add_argument("--protocol", choices=["nbd", "nvme-tcp"], default="nbd")
    args = bench.parse(parser)
    result: dict = {where: [] for where in PLACES}
    for number in range(args.rounds):
        for where in PLACES:
            one = measured(where, args.lease, args.protocol)
            result[where].append(one)
            mib = one["stored"] / MIB
            note(f"round {number + 1}: to {PLACES[where]}: {mib:.0f} MiB in {one['seconds']:.2f} s")
    bench.finish(result, report)


def main() -> None:
    main_of(__doc__, measure)


if __name__ == "__main__":
    bench.start(main)
