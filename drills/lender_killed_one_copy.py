#!/usr/bin/python3 -B
"""Kills the host of a lender whose pages have no second copy.

The region has two extents of 64 MiB, each at another lender. The host of one lender dies, and its
pages with it. Lost is exactly what was in that extent and not in the borrower's RAM. Each such page
is an error, and none reads as zeroes. The other extent stays whole.
"""

from scene.load import Load
from scene.loss import lose
from scene.row import Row, start


def drill(scene) -> Row:
    lenders = [scene.lender("b"), scene.lender("c")]
    load = Load(scene.host("a"), lenders, 128, "--fault-timeout", "500ms", cache_mib=8, stride=4)
    expected, found = lose(load, [lenders[0]])
    return Row("one of two lenders dies with its pages, one copy", load, found, expected)


if __name__ == "__main__":
    start(drill)
