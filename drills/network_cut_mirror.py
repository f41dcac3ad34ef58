#!/usr/bin/python3 -B
"""Cuts the link of one of two lenders while the load runs, and mends it, three times.

The load goes on with the other copy. The lender gets what it missed.
"""

from scene.load import Load
from scene.row import Row, start

CUT_S = 3


def drill(scene) -> Row:
    lenders = [scene.lender("b"), scene.lender("c")]
    load = Load(scene.host("a"), lenders, 32, "--protection", "mirror")
    load.settle()
    for turn in range(3):
        load.wait_until_whole()
        host = lenders[turn % 2].host
        host.connect(False)
        load.run(CUT_S)
        host.connect(True)
    repair = load.wait_until_whole()
    load.verify()
    return Row(f"a lender's link is cut for {CUT_S} s, 3 times, two copies", load,
               f"each silence; whole {repair:.1f} s after the link is back")


if __name__ == "__main__":
    start(drill)
