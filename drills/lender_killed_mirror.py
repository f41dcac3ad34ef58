#!/usr/bin/python3 -B
"""Kills a lender of pages that have two copies.

The load goes on with the other copy. The lender comes back with the pages that it had, and gets
what it missed. Then the load reads every page.
"""

from scene.load import Load
from scene.row import Row, start


def drill(scene) -> Row:
    lenders = [scene.lender("b"), scene.lender("c")]
    load = Load(scene.host("a"), lenders, 32, "--protection", "mirror")
    load.wait_until_whole()
    load.settle()
    before = load.run(2)
    lenders[0].kill()
    load.run(4)
    lenders[0].start()
    repair = load.wait_until_whole()
    load.run(0)
    after = load.run(2)
    rate = after["verified"] / after["seconds"] / (before["verified"] / before["seconds"])
    load.verify()
    return Row(
        "a lender of two copies is killed, and comes back after 4 s",
        load,
        f"the copy lagged; whole {repair:.1f} s after its return, then {rate:.0%} of the rate",
    )


if __name__ == "__main__":
    start(drill)
