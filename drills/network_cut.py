#!/usr/bin/python3 -B
"""Cuts a lender's link while the load runs, and mends it, three times.

With one copy the load waits, and goes on when the link is back. Nothing is lost.
"""

import time

from scene.load import Load
from scene.row import Row, start

CUT_S = 3


def drill(scene) -> Row:
    lender = scene.lender("b")
    load = Load(scene.host("a"), [lender], 32)
    load.settle()
    back = []
    for _ in range(3):
        load.run(1)
        lender.host.connect(False)
        time.sleep(CUT_S)
        lender.host.connect(True)
        began = time.monotonic()
        load.run(0)
        back.append(time.monotonic() - began)
        load.run(1)
    load.verify()
    return Row(f"a lender's link is cut for {CUT_S} s, 3 times, one copy", load,
               f"the silence; the load goes on {max(back):.1f} s after the link at most")


if __name__ == "__main__":
    start(drill)
