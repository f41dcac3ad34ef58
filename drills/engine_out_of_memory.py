#!/usr/bin/python3 -B
"""Lets the kernel's OOM killer kill the engine of a region while the load runs, five times.

The engine is moved into a memory cgroup that has no memory. The supervisor, which is not in it,
starts the next engine.
"""

from scene.cgroup import Trap
from scene.load import Load
from scene.row import Row, start

TIMES = 5


def drill(scene) -> Row:
    load = Load(scene.host("a"), [scene.lender("b")], 32)
    load.settle()
    kills = 0
    for number in range(TIMES):
        engine = load.show()["pid"]
        with Trap(f"engine{number}", 4096) as trap:
            trap.take(engine)
            trap.wait_for_kill(engine)
            kills += trap.kills()
        load.wait_for_engine_after(engine)
        load.run(1)
    load.verify()
    return Row(f"a region's engine is killed for memory, {TIMES} times", load,
               f"{kills} kills by the kernel's OOM killer; each engine had a successor")


if __name__ == "__main__":
    start(drill)
