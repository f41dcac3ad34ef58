#!/usr/bin/python3 -B
"""Slows a lender's link down to 20 Mbit a second while the load runs, by the kernel's tbf."""

from scene.load import Load
from scene.row import Row, start


def drill(scene) -> Row:
    lender = scene.lender("b")
    load = Load(scene.host("a"), [lender], 32)
    load.settle()
    load.run(2)
    lender.host.shape("tbf", "rate", "20mbit", "burst", "32kb", "latency", "400ms")
    slow = load.run(5)
    lender.host.unshape()
    load.run(2)
    load.verify()
    return Row("a lender's link has 20 Mbit/s for 5 s, one copy", load,
               f"no fault: {slow['verified'] / slow['seconds']:.0f} pages a second meanwhile")


if __name__ == "__main__":
    start(drill)
