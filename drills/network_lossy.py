#!/usr/bin/python3 -B
"""Makes a lender's link lose packets while the load runs.

With the kernel's netem, it loses 2 % of the packets in each direction. If this kernel has no netem,
a tbf with a queue of two packets drops what a burst brings beyond it.
"""

from scene import Failed
from scene.load import Load
from scene.row import Row, start


def drill(scene) -> Row:
    lender = scene.lender("b")
    load = Load(scene.host("a"), [lender], 32)
    load.settle()
    load.run(1)
    try:
        lender.host.shape("netem", "loss", "2%", "delay", "1ms")
        how = "netem loses 2 %"
    except Failed:
        lender.host.shape("tbf", "rate", "100mbit", "burst", "4kb", "limit", "8kb")
        how = "a short queue drops"
    load.run(6)
    packets, dropped = lender.host.packets()
    lender.host.unshape()
    load.run(1)
    load.verify()
    if not dropped:
        raise Failed("the link dropped no packet")
    return Row(f"a lender's link loses packets for 6 s, one copy ({how})", load,
               f"TCP repeats: {dropped} of {packets} packets dropped")


if __name__ == "__main__":
    start(drill)
