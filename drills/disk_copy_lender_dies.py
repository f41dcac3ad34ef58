#!/usr/bin/python3 -B
"""Kills the host of the only lender, while the borrower's disk has a second copy.

The load goes on with the copy on the disk. Then it reads every page.
"""

from scene.load import Load
from scene.row import Row, start


def drill(scene) -> Row:
    borrower, lender = scene.host("a"), scene.lender("b")
    words = ("--protection", "disk", "--copy-dir", "/var/lib/copies")
    load = Load(borrower, [lender], 32, *words, "--fault-timeout", "8s")
    load.wait_until_on_disk()
    load.settle()
    load.run(2)
    ring = load.disk_copy()["in_ring"]
    lender.kill()
    load.run(4)
    load.verify()
    held = load.disk_copy()["held"]
    return Row(
        "the only lender dies for good, with a second copy on the disk", load,
        f"the disk has {held >> 20} MiB; {ring >> 10} KiB were on their way just before",
    )


if __name__ == "__main__":
    start(drill)
