#!/usr/bin/python3 -B
"""Kills the hosts of both lenders of a pair at once.

The region has two extents of 64 MiB, each at another pair of lenders. The hosts of one pair die,
and both copies with them. Lost is exactly what was in that extent and not in the borrower's RAM.
Each such page is an error, and none reads as zeroes. The extent of the other pair stays whole.
"""

from scene.load import Load
from scene.loss import lose
from scene.row import Row, start


def drill(scene) -> Row:
    lenders = [scene.lender(name) for name in "bcde"]
    load = Load(
        scene.host("a"), lenders, 128, "--protection", "mirror", "--fault-timeout", "1s",
        cache_mib=8, stride=8,
    )
    load.wait_until_whole()
    expected, found = lose(load, lenders[:2])
    return Row("both lenders of one of two pairs die with their pages", load, found, expected)


if __name__ == "__main__":
    start(drill)
