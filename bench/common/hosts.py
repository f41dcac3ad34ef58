"""Hosts in network namespaces on one bridge, each with its own /run and /var/lib, and their agents.
"""

import concurrent.futures
import hashlib
import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

from common.bench import AQUIFER, Failed, end, run, wait

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

    def join(self, bridge: "Namespace", name: str, address: str) -> None:
        """Joins the bridge in that other namespace, with this address."""
        bridge.run("ip", "link", "add", "name", name, "type", "veth", "peer", "eth0",
                   "netns", self.pid)
        bridge.run("ip", "link", "set", "dev", name, "master", "bridge", "up")
        self.run("ip", "address", "add", f"{address}/24", "dev", "eth0")
        for link in ("eth0", "lo"):
            self.run("ip", "link", "set", link, "up")


def make_bridge() -> Namespace:
    """Makes a namespace with a bridge that hosts can join."""
    bridge = Namespace("exec sleep inf")
    bridge.wait_until_ready()
    bridge.run("ip", "link", "add", "bridge", "type", "bridge")
    bridge.run("ip", "link", "set", "bridge", "up")
    return bridge


class Host(Namespace):
    """A host on the bridge, and its agent."""

    def __init__(self, bridge: Namespace, number: int):
        super().__init__(HOLD)
        self.name, self.agent = f"h{number}", None
        self.address = ADDRESS.format(number)
        self.wait_until_ready()
        self.join(bridge, self.name, self.address)

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
        self.bridge, self.hosts, self.make = make_bridge(), [], make
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
