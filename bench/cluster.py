#!/usr/bin/python3 -B
"""Measures a cluster of 20 hosts: joins, deaths, and what an idle agent costs.

Each host is a network namespace on one bridge, with its own /run and /var/lib. After 20 hosts have
joined, the script measures 30 s of idleness: the CPU time of each agent, and the bytes that cross
its host's network interface in both directions. Then another host joins and lends: all others lend
nothing by then. At last three agents are killed at once, among them the lender; the borrower must
name the lease that this concerns. Needs root, swap and iproute2. Build first:
    cargo build --release -p aquifer-cli

Usage: bench/cluster.py [--rounds N] [--hosts 20] [--json]
"""

import concurrent.futures
import hashlib
import json
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path

from common import bench
from common.bench import AQUIFER, Failed, end, note, run, wait

IDLE_S = 30
KILLED = 3
# Networks for documentation (RFC 5737) reach no real host from these namespaces.
ADDRESS = "198.51.100.{}"
DIR = "/run/bench"
HOLD = f"mount -t tmpfs t /run && mount -t tmpfs t /var/lib && mkdir {DIR} && exec sleep inf"


class Namespace:
    """A process that holds a network and a mount namespace; both end with it."""

    def __init__(self, script: str):
        self.holder = subprocess.Popen(["unshare", "-n", "-m", "sh", "-c", script])

    @property
    def pid(self) -> int:
        return self.holder.pid

    def command(self, *words) -> list:
        return ["nsenter", "-t", str(self.pid), "-n", "-m", *map(str, words)]

    def run(self, *words) -> str:
        return run(*self.command(*words))

    def wait_until_ready(self) -> None:
        def is_apart() -> bool:
            return Path(f"/proc/{self.pid}/comm").read_text().strip() == "sleep"
        wait("a namespace", is_apart)


class Host(Namespace):
    """A host on the bridge, and its agent."""

    def __init__(self, bridge: Namespace, number: int):
        super().__init__(HOLD)
        self.name, self.agent = f"h{number}", None
        self.address = ADDRESS.format(number)
        self.wait_until_ready()
        bridge.run("ip", "link", "add", self.name, "type", "veth", "peer", "eth0",
                   "netns", self.pid)
        bridge.run("ip", "link", "set", self.name, "master", "bridge", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            self.run("ip", "link", "set", link, "up")

    def aquifer(self, *words):
        """Runs an `aquifer` command, and returns the JSON that it prints."""
        return json.loads(self.run(AQUIFER, "--json", *words) or "null")

    def belong(self, *words):
        """Runs `aquifer cluster create` or `join`, and starts the agent."""
        own = ["--host", self.name, "--address", self.address,
               "--config", f"{DIR}/agent.toml", "--cluster-dir", f"{DIR}/cluster"]
        made = self.aquifer("cluster", *words, *own)
        self.start()
        return made

    def start(self) -> None:
        words = self.command(AQUIFER, "serve", "agent", "--config", f"{DIR}/agent.toml")
        self.agent = subprocess.Popen(words, stderr=subprocess.DEVNULL)

    def known(self) -> dict:
        """Returns the standing of each host, as this one knows it; empty without an agent."""
        words = self.command(AQUIFER, "--json", "cluster", "status")
        done = subprocess.run(words, capture_output=True, text=True)
        hosts = json.loads(done.stdout)["hosts"] if done.returncode == 0 else []
        return {host["host"]: host["standing"] for host in hosts}

    def cpu(self) -> float:
        """Returns the agent's CPU seconds, by the scheduler's count in ns."""
        tasks = Path(f"/proc/{self.agent.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def network(self) -> int:
        """Returns the bytes that crossed the host's interface."""
        device = Path(f"/proc/{self.pid}/net/dev").read_text()
        words = next(line for line in device.splitlines() if "eth0" in line).split(":")[1].split()
        return int(words[0]) + int(words[8])

    def files(self) -> dict:
        """Returns the hash of each file that an operator may edit."""
        root = Path(f"/proc/{self.pid}/root{DIR}")
        paths = [root / "agent.toml", *sorted((root / "tls").iterdir())]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    def end(self) -> None:
        if self.agent:
            # The agent returns what it borrowed, if its lender lives.
            self.agent.send_signal(signal.SIGINT)
            try:
                self.agent.wait(20)
            except subprocess.TimeoutExpired:
                end(self.agent)
        end(self.holder)


class Cluster:
    def __init__(self, make=Host):
        self.bridge, self.hosts, self.make = Namespace("exec sleep inf"), [], make
        self.bridge.wait_until_ready()
        self.bridge.run("ip", "link", "add", "bridge", "type", "bridge")
        self.bridge.run("ip", "link", "set", "bridge", "up")
        self.joined_ms, self.token = [], None

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        for host in self.hosts:
            host.end()
            shutil.rmtree(f"/dev/shm/aquifer/{host.name}", ignore_errors=True)
        end(self.bridge.holder)

    def add(self) -> Host:
        host = self.make(self.bridge, len(self.hosts) + 1)
        began = time.monotonic()
        self.hosts.append(host)
        if self.token:
            host.belong("join", f"{self.hosts[0].address}:7070", "--token", self.token)
        else:
            self.token = host.belong("create")["token"]
        wait(f"{host.name} is up", lambda: host.known().get(host.name) == "up")
        self.joined_ms.append(round(1000 * (time.monotonic() - began)))
        return host

    def wait_until_all_know(self, hosts: list, standing: str) -> int:
        """Returns the milliseconds until each live host knows the standing of these."""
        began, names = time.monotonic(), [host.name for host in hosts]
        live = [host for host in self.hosts if host.agent.poll() is None]

        def knows(host: Host) -> bool:
            known = host.known()
            return all(name == host.name or known.get(name) == standing for name in names)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            while live:
                ready = list(pool.map(knows, live))
                live = [host for host, is_ready in zip(live, ready) if not is_ready]
                if time.monotonic() - began > 60:
                    raise Failed(f"{[host.name for host in live]} do not know that {names} are "
                                 f"{standing}")
        return round(1000 * (time.monotonic() - began))


def idle(cluster: Cluster) -> dict:
    time.sleep(5)
    before = [(host.cpu(), host.network()) for host in cluster.hosts]
    time.sleep(IDLE_S)
    after = [(host.cpu(), host.network()) for host in cluster.hosts]
    changes = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(after, before)]
    cpu = [100 * seconds / IDLE_S for seconds, _ in changes]
    network = [count / IDLE_S for _, count in changes]
    return {
        "cpu_percent": statistics.mean(cpu), "most_cpu_percent": max(cpu),
        "bytes_per_s": statistics.mean(network), "most_bytes_per_s": max(network),
    }


def measure(count: int) -> dict:
    with Cluster() as cluster:
        for _ in range(count):
            cluster.add()
        cluster.wait_until_all_know(cluster.hosts, "up")
        result = {"join_ms": cluster.joined_ms[1:]} | idle(cluster)
        note(f"{count} hosts idle: {result['cpu_percent']:.2f} % of a processor each")
        # Only the new host lends. The same orders would empty a host before it stops.
        for host in cluster.hosts:
            host.run(AQUIFER, "host", "drain")
        files = [host.files() for host in cluster.hosts]
        first, began = cluster.hosts[0], time.monotonic()
        new = cluster.add()
        result["known_ms"] = cluster.joined_ms[-1] + cluster.wait_until_all_know([new], "up")
        first.aquifer("host", "borrow", "--size", "64M")
        result["lends_ms"] = round(1000 * (time.monotonic() - began))
        result["files_touched"] = sum(
            host.files() != former for host, former in zip(cluster.hosts, files)
        )
        killed = [new, *cluster.hosts[3:3 + KILLED - 1]]
        for host in killed:
            host.agent.kill()
        for host in killed:
            host.agent.wait()
        began = time.monotonic()
        result["down_ms"] = cluster.wait_until_all_know(killed, "down")

        status = first.aquifer("status")
        lease = status["borrowed"][0]["leases"][0]["lease"]
        if not any(lease in event["what"] for event in status["events"]):
            raise Failed(f"{first.name} does not say that lease {lease} is out of reach")
        new.start()
        first.run(AQUIFER, "host", "return")
        return result


def report(result: dict) -> None:
    for of in result["rounds"]:
        print(f"join, with the start of the agent     {statistics.median(of['join_ms']):8.0f} ms")
        print(f"one more host: all know it            {of['known_ms']:8} ms")
        print(f"one more host: it lends               {of['lends_ms']:8} ms")
        print(f"files of other hosts that changed     {of['files_touched']:8}")
        print(f"{KILLED} hosts killed: all know it          {of['down_ms']:8} ms")
        print(f"idle agent, mean                      {of['cpu_percent']:8.2f} % of a processor")
        print(f"idle agent, most                      {of['most_cpu_percent']:8.2f} %")
        print(f"network of an idle host, mean         {of['bytes_per_s']:8.0f} B/s")
        print(f"network of an idle host, most         {of['most_bytes_per_s']:8.0f} B/s")


def main() -> None:
    parser = bench.arguments(__doc__, rounds=1)
    parser.add_argument("--hosts", type=int, default=20, help="hosts to begin with (default: 20)")
    args = bench.parse(parser)
    rounds = [measure(args.hosts) for _ in range(args.rounds)]
    bench.finish({"hosts": args.hosts, "rounds": rounds}, report)


if __name__ == "__main__":
    bench.start(main)
