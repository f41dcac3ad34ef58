#!/usr/bin/python3 -B
"""Lets the kernel's OOM killer kill the borrower's program.

The program is in a memory cgroup, and allocates until it is killed. What it wrote stays in the
region: the next program reads every page.
"""

from scene.cgroup import Trap
from scene.load import Load
from scene.row import Row, start


def drill(scene) -> Row:
    load = Load(scene.host("a"), [scene.lender("b")], 32)
    load.settle()
    load.run(2)
    versions = scene.work / "versions"
    with Trap("program", 256 << 20) as trap:
        load.pause()
        load.save(versions)
        trap.take(load.program.pid)
        load.order("hoard")
        trap.wait_for_kill(load.program.pid)
        end = load.program.wait()
        load.program = load.start(versions)
        load.verify()
        load.run(1)
        load.verify()
        found = f"the kernel's OOM killer, {trap.kills()} kill; the program ended with {end}"
    return Row("the program of a region is killed for memory", load, found)


if __name__ == "__main__":
    start(drill)
