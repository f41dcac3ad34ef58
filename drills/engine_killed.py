#!/usr/bin/python3 -B
"""Kills the engine of a region by SIGKILL while the load runs, twenty times.

The supervisor starts the next engine each time, and the load waits for that.
"""

import os
import signal

from scene.load import Load
from scene.row import Row, start

TIMES = 20


def drill(scene) -> Row:
    load = Load(scene.host("a"), [scene.lender("b")], 32)
    load.settle()
    engines = set()
    for _ in range(TIMES):
        engine = load.show()["pid"]
        engines.add(engine)
        os.kill(engine, signal.SIGKILL)
        load.wait_for_engine_after(engine)
        load.run(0.3)
    load.verify()
    return Row(f"a region's engine is killed {TIMES} times, one copy", load,
               f"{len(engines)} engines died, and each had a successor")


if __name__ == "__main__":
    start(drill)
