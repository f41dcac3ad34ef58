#!/usr/bin/python3 -B
"""Lets the wall clock of each host in turn jump by an hour, 61 days and years, under load.

The clock jumps ahead or back, and is right again after some seconds. In 11 years, the authority's
certificate has ended, too. Linux has no namespace for the wall clock, so libfaketime tells the
wrong time to the host's programs: agent, engine and load. One host signs the certificates, which
last for seconds; one borrows, and one lends.
"""

import time
from pathlib import Path

from scene import Failed, wait
from scene.agents import DIR, cluster
from scene.certificates import LIFETIME, certificate, is_good, must_answer
from scene.clocks import LIBRARIES, ClockHost
from scene.load import Load
from scene.row import Row, Skip, start

DAY_S = 24 * 3600
JUMPS_S = (3600, 61 * DAY_S, -61 * DAY_S, 11 * 365 * DAY_S)


def standings(host, hosts: list) -> set:
    """Returns how a host sees these."""
    return {host.known().get(other.name) for other in hosts if other is not host}


def has_noticed(host, hosts: list) -> bool:
    """Returns whether all have acted on the wrong clock. The others call the host down. A signer
    has signed a certificate for itself that holds by its clock. Another host finds no signer that
    it believes."""
    now = certificate(host)
    is_wrong = now["state"] == "good" if host is hosts[0] else "failed" in now
    return is_wrong and all(standings(other, [host]) == {"down"} for other in others(host, hosts))


def is_right(host, hosts: list) -> bool:
    """Returns whether the host has a certificate that holds, and calls all others up."""
    now = certificate(host)
    return now["state"] == "good" and "failed" not in now and standings(host, hosts) == {"up"}


def others(host, hosts: list) -> list:
    return [other for other in hosts if other is not host]


def jump(host, hosts: list, ahead_s: int, load) -> float:
    """Sets one host's clock wrong, and then right. Returns the seconds until all hosts trust each
    other again."""
    host.set_clock(ahead_s)
    wait(f"the jump of {host.name}", host.agent_follows)
    wait(f"{host.name} acts on it", lambda: has_noticed(host, hosts))
    load.run(0.5)
    if ended := [other.name for other in others(host, hosts) if not is_good(other)]:
        raise Failed(f"the jump of {host.name} by {ahead_s} s ended the certificates of {ended}")
    host.set_clock(0)
    began = time.monotonic()
    wait("all hosts are as before", lambda: all(is_right(other, hosts) for other in hosts))
    taken = time.monotonic() - began
    for other in others(host, hosts):
        must_answer([host, other])
    return taken


def drill(_scene) -> Row:
    if not LIBRARIES:
        raise Skip("libfaketime is missing; run: scripts/install-packages drills")
    hosts = cluster(3, ClockHost, LIFETIME)
    load = Load(hosts.hosts[1], [], 64, cache_mib=8)
    load.settle()
    load.run(1)
    before = load.borrowed()
    if LIBRARIES[0].name not in Path(f"/proc/{load.show()['pid']}/maps").read_text():
        raise Failed("the region's engine does not follow the clock of its host")
    back = [jump(host, hosts.hosts, ahead_s, load)
            for host in hosts.hosts for ahead_s in JUMPS_S]
    load.run(1)
    load.verify()
    load.must_have_borrowed(before)
    if any((host.root / DIR.lstrip("/") / "tls/revoked.json").exists() for host in hosts.hosts):
        raise Failed("a host was revoked")
    return Row(
        "the wall clocks of signer, borrower and lender jump by an hour, 61 days and 11 years",
        load, f"no lease ended, no host was revoked, and no other certificate ended; all was as "
        f"before {max(back):.1f} s after the clock was right, at most ({len(back)} jumps)",
    )


if __name__ == "__main__":
    start(drill)
