#!/usr/bin/python3 -B
"""Replaces the agent of each host in turn while the load runs, as an upgrade does.

Four hosts have agents. One borrows for the load's region. Each agent gets SIGTERM, and the next one
takes over. Then each gets SIGKILL, which is an upgrade that went wrong. The load must keep the
leases that it had.
"""

import signal

from scene.agents import cluster
from scene.load import Load
from scene.row import Row, start


def drill(_scene) -> Row:
    hosts = cluster(4)
    load = Load(hosts.hosts[0], [], 64, cache_mib=8)
    load.settle()
    load.run(1)
    before = load.borrowed()
    for kind in (signal.SIGTERM, signal.SIGKILL):
        for host in hosts.hosts:
            host.restart(kind)
            load.run(1)
    load.verify()
    load.must_have_borrowed(before)
    lenders = ", ".join(sorted(lender for _, lender, _ in before))
    return Row("4 agents are replaced in turn, twice", load,
               f"no page was away for good; the same leases; lender: {lenders}")


if __name__ == "__main__":
    start(drill)
