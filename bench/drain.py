#!/usr/bin/python3 -B
"""Measures how long a planned stop of a lender takes under load, and checks that no page is lost.

Real agents run, as in recall.py. A borrows from B, swaps checked content to it and goes on
rewriting it. Then `aquifer host drain` runs on B. A moves all of it to another lender or, where no
other host has room, to its own spill file. Each round measures from the order to its end, stops B,
and then checks every byte. Needs root and swap. Build first:
    cargo build --release -p aquifer-cli

Usage: bench/drain.py [--rounds N] [--lease 1G] [--protocol nbd|nvme-tcp] [--json]
"""

import json
import subprocess
import time

from common import bench
from common.bench import AQUIFER, GIB, PAGE, Failed
from recall import Cluster, Host, check_place, main_of


def drain(host: Host) -> dict:
    """Drains a host. Returns the time and the number of reports on the way."""
    began = time.monotonic()
    command = [AQUIFER, "host", "drain", "--json", "--socket", host.socket]
    done = subprocess.run(command, capture_output=True, text=True)
    took = time.monotonic() - began
    if done.returncode != 0:
        raise Failed(f"aquifer host drain failed: {done.stderr}")
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    if reports[-1]["left"] or host.status()["lent"]:
        raise Failed(f"the borrower has not returned all: {reports[-1]}")
    stored = sum(left["bytes"] for left in reports[0]["left"])
    return {"stored": stored, "seconds": took, "reports": len(reports)}


def measure(where: str, lease: int, protocol: str) -> dict:
    """Drains all that is stored in a lease, and then checks every byte."""
    names = ["a", "b", "c"] if where == "lender" else ["a", "b"]
    with Cluster(names, protocol) as cluster:
        # c starts after b has lent: a borrows from the host that can spare most.
        a = cluster.start("a", lease // 4)
        b = cluster.start("b", lease * 5 // 2)
        a.borrow(lease + lease // 8)
        program = cluster.load(a, lease + lease // 8)
        program.wait_for("filled")
        if where == "lender":
            cluster.start("c", lease * 5 // 2)
        program.order("rewrite")
        result = drain(b)
        cluster.stop("b")
        program.wait_for("filled")
        program.verify()
        check_place(a, where)
        result["checked"] = program.pages * PAGE
        return result | {"seconds_per_gib": result["seconds"] * GIB / result["stored"]}


def main() -> None:
    main_of(__doc__, measure)


if __name__ == "__main__":
    bench.start(main)
