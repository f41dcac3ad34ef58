#!/usr/bin/python3 -B
"""Fills the borrower's disk under second copies.

Programs go on with one copy, and the status says so. Once the disk has room it gets what it lacks:
then the only lender dies for good, and the load reads every page.
"""

from scene import Failed, wait
from scene.load import Load
from scene.row import Row, start

DISK = "/var/lib/copies"


def drill(scene) -> Row:
    borrower, lender = scene.host("a"), scene.lender("b", 128)
    borrower.run("mkdir", DISK)
    borrower.run("mount", "-t", "tmpfs", "-o", "size=4M", "t", DISK)
    words = ("--protection", "disk", "--copy-dir", DISK)
    # More than the ring of pages on their way to the disk can hold.
    load = Load(borrower, [lender], 128, *words, "--fault-timeout", "8s")
    wait("the disk is full", lambda: "paused" in load.disk_copy() and load.disk_copy()["lacks"])
    load.settle()
    load.run(4)
    full = load.disk_copy()
    if not full.get("paused") or not full["lacks"]:
        raise Failed(f"the disk had room: {full}")
    borrower.run("mount", "-o", "remount,size=256M", DISK)
    repair = load.wait_until_on_disk()
    load.run(1)
    lender.kill()
    load.run(2)
    load.verify()
    return Row(
        "the disk under second copies is full, then the only lender dies", load,
        f"{full['lacks'] >> 20} MiB had one copy; whole {repair:.1f} s after there was room",
    )


if __name__ == "__main__":
    start(drill)
