#!/usr/bin/python3 -B
"""Fills the tmpfs of a lender with something else while the load runs.

Its writes fail with "no space". The borrower moves the extent to the other lender. The drill fails
if the extent stays and no write was refused.
"""

import os

from scene import Failed
from scene.load import Load
from scene.row import Row, start


def drill(scene) -> Row:
    lenders = [scene.lender("b"), scene.lender("c")]
    # The half of the region that is still in RAM needs new room at the lender.
    load = Load(scene.host("a"), lenders, 64, cache_mib=32)
    load.settle()
    full = max(lenders, key=lambda lender: lender.stored())
    # The tmpfs gets room for a tenth more than what it has.
    load.pause()
    load.wait_until_still()
    full.host.run("mount", "-o", f"remount,size={full.stored() * 11 // 10}", "/dev/shm")
    full.host.run("sh", "-c", "head -c 1G /dev/zero > /dev/shm/filler || true")
    room = os.statvfs(full.folder())
    if room.f_bfree:
        raise Failed(f"the tmpfs of {full.host.name} still has {room.f_bfree} free blocks")
    load.rewrite()
    load.run(3)
    load.verify()
    [there] = [lease for lease in load.leases() if lease["lender"] == full.host.name]
    if there["used_extents"] and there["state"] != "full":
        raise Failed(f"no write to {full.host.name} was refused: its lease is {there['state']}")
    states = [f"{lease['lender']} {lease['state']}, {lease['used_extents']} extents"
              for lease in load.leases()]
    return Row("a lender's tmpfs is full, another lender has room", load, "; ".join(states))


if __name__ == "__main__":
    start(drill)
