#!/usr/bin/python3 -B
"""Lets a stranger and another tenant of the cluster try to reach a lease while the load runs.

The stranger is on the same network and has no certificate. The other tenant is a host of the
cluster, knows the lease by name, and has its own certificate. Each lists and opens leases, asks for
the lender's status, orders it to borrow, and ends the lease in the borrower's place.
"""

import json
from pathlib import Path

from scene import PYTHON, Failed
from scene.agents import ADDRESS, DIR, cluster
from scene.load import Load
from scene.row import Row, start

STRANGER = Path(__file__).parent / "scene/stranger.py"
REFUSALS = ("needs TLS", "closed", "refused", "an empty list")


def is_refusal(what: str, answer: str) -> bool:
    # A lender ignores the end of a lease of another host. The drill looks for the lease later.
    is_ignored = what == "end of the lease" and answer == "HTTP/1.1 200 OK {}"
    return answer in REFUSALS or answer.startswith("HTTP/1.1 403 ") or is_ignored


def drill(_scene) -> Row:
    hosts = cluster(3)
    load = Load(hosts.hosts[0], [], 64, cache_mib=8)
    load.settle()
    load.run(1)
    [lease] = load.leases()
    [lender] = [host for host in hosts.hosts if host.name == lease["lender"]]
    [tenant] = [host for host in hosts.hosts[1:] if host is not lender]
    hosts.bridge.run("ip", "address", "add", f"{ADDRESS.format(200)}/24", "dev", "bridge")
    words = [PYTHON, "-B", STRANGER, lender.address, lease["lease"]]
    got = {
        "stranger": json.loads(hosts.bridge.run(*words)),
        "tenant": json.loads(tenant.run(*words, f"{DIR}/tls")),
    }
    for caller, answers in got.items():
        for what, answer in answers.items():
            if not is_refusal(what, answer):
                raise Failed(f"the {caller} got this for '{what}': {answer}")
    load.run(1)
    load.verify()
    if [now["lease"] for now in load.leases()] != [lease["lease"]]:
        raise Failed("the lease has ended")
    count = sum(map(len, got.values()))
    return Row("a stranger and another tenant reach for a lease", load,
               f"{count} attempts, none told or ended anything")


if __name__ == "__main__":
    start(drill)
