#!/usr/bin/python3 -B
"""Lets one lender serve 200 leases of four borrowers at once, and kills it under their loads.

Each lease is an extent of 64 MiB of its own. A lender serves at most 384 connections of one host,
which is 76 leases of a region: hence four borrowers. The lender comes back after two seconds.
"""

import time

from scene import Failed
from scene.load import Load, Sum
from scene.row import Row, start

LEASES = 50


def drill(scene) -> Row:
    names = {host: [f"{host}{number}" for number in range(LEASES)] for host in "acde"}
    words = [word for some in names.values() for name in some for word in ("--name", name)]
    lender = scene.lender("b", 64, *words)
    loads = []
    for host, some in names.items():
        uris = [f"{lender.uri}{name}" for name in some]
        loads.append(Load(scene.host(host), uris, 64 * LEASES, cache_mib=8, stride=256))
    for load in loads:
        load.settle()
    time.sleep(2)
    lender.kill()
    time.sleep(2)
    lender.start()
    for load in loads:
        load.run(1)
    for load in loads:
        load.verify()
    used = sum(lease["used_extents"] for load in loads for lease in load.leases())
    if used != LEASES * len(loads):
        raise Failed(f"{used} of {LEASES * len(loads)} leases are in use")
    return Row("a lender of 200 leases is killed, and back after 2 s", Sum(loads),
               f"{used} leases in use, all served again")


if __name__ == "__main__":
    start(drill)
