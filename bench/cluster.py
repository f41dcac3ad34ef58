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

import statistics
import time

from common import bench
from common.bench import AQUIFER, Failed, note
from common.hosts import Cluster

IDLE_S = 30
KILLED = 3


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
