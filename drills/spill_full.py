#!/usr/bin/python3 -B
"""Drains the only lender while the borrower's disk for spilled pages is full.

The pages stay at the lender until the disk has room. Then they go to the spill file, and the drain
ends.
"""

import subprocess

from scene import AQUIFER, Failed, wait
from scene.agents import cluster
from scene.load import Load
from scene.row import Row, start

SPILL = "/var/lib/spill"


def drill(_scene) -> Row:
    hosts = cluster(2)
    borrower, lender = hosts.hosts
    borrower.run("mkdir", SPILL)
    borrower.run("mount", "-t", "tmpfs", "-o", "size=4M", "t", SPILL)
    borrower.configure("borrow", f'spill = "{SPILL}"')
    borrower.restart(15)
    load = Load(borrower, [], 64, cache_mib=8)
    load.settle()
    load.run(1)
    drain = lender.launch(AQUIFER, "--json", "host", "drain", stdout=subprocess.PIPE)
    load.run(6)
    left = sum(lent["stored"] for lent in lender.aquifer("status")["lent"])
    if drain.poll() is not None or not left:
        raise Failed("the drain ended, but the spill file had no room")
    load.verify()
    borrower.run("mount", "-o", "remount,size=256M", SPILL)
    load.run(1)
    wait("the end of the drain", lambda: drain.poll() is not None, 120)
    load.run(1)
    load.verify()
    spilled = load.show()["volume"]["spill"]
    return Row(
        "the spill disk is full while the only lender drains", load,
        f"{left >> 20} MiB stayed at the lender until the disk had room; then "
        f"{spilled['used_extents']} extent went there",
    )


if __name__ == "__main__":
    start(drill)
