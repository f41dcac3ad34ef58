#!/usr/bin/python3 -B
"""Kills both lenders of two copies, one after the other, with a repair between.

Each comes back with the pages that it had, and gets what it missed before the other one dies.
"""

from scene.load import Load
from scene.row import Row, start


def drill(scene) -> Row:
    lenders = [scene.lender("b"), scene.lender("c")]
    load = Load(scene.host("a"), lenders, 32, "--protection", "mirror")
    load.wait_until_whole()
    load.settle()
    repairs = []
    for lender in lenders:
        lender.kill()
        load.run(3)
        lender.start()
        repairs.append(load.wait_until_whole())
        load.run(1)
    load.verify()
    found = "each death; both copies whole " + " and ".join(f"{one:.1f} s" for one in repairs)
    return Row("two lenders are killed in turn, two copies", load, f"{found} after the return")


if __name__ == "__main__":
    start(drill)
