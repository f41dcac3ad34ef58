#!/usr/bin/python3 -B
"""Lets the monotonic and boot clocks of all agents jump by a year, forth and back, under load.

Each agent restarts in a time namespace whose clocks are a year ahead, and then again in the old
one. Linux has no namespace for the wall clock: `wall_clock_jump` has another way.
"""

import os
import signal
from pathlib import Path

from scene import AQUIFER, wait
from scene.agents import DIR, cluster
from scene.load import Load
from scene.row import Row, Skip, start

YEAR_S = 365 * 24 * 3600


def start_ahead(host) -> int:
    """Starts the host's agent a year ahead, and returns its process."""
    ahead = ["unshare", "--time", "--monotonic", YEAR_S, "--boottime", YEAR_S, "--fork"]
    agent = [AQUIFER, "serve", "agent", "--config", f"{DIR}/agent.toml"]
    host.agent = host.launch(*ahead, *agent, stderr=host.log(), stdout=host.log())
    children = Path(f"/proc/{host.agent.pid}/task/{host.agent.pid}/children")
    wait("the agent", lambda: children.read_text())
    return int(children.read_text().split()[0])


def drill(_scene) -> Row:
    if not Path("/proc/self/ns/time").exists():
        raise Skip("this kernel has no time namespaces")
    hosts = cluster(3)
    load = Load(hosts.hosts[0], [], 64, cache_mib=8)
    load.settle()
    for host in hosts.hosts:
        host.agent.terminate()
        host.agent.wait()
        ahead = start_ahead(host)
        host.wait_until_up()
        load.run(1)
        os.kill(ahead, signal.SIGTERM)
        host.agent.wait()
        host.start()
        host.wait_until_up()
        load.run(1)
    load.verify()
    return Row("the clocks of 3 agents jump by a year, forth and back", load,
               "no lease ended (monotonic and boot clocks; not the wall clock)")


if __name__ == "__main__":
    start(drill)
