#!/usr/bin/python3 -B
"""Changes pages at a lender that has the only copy, as root there.

A quarter of them get one bit flipped, a quarter another page's content, a quarter an older version,
and a quarter zeroes. Each must be an error: lost, and not shown.
"""

from scene.lies import lie
from scene.load import Load
from scene.row import Row, start


def drill(scene) -> Row:
    lender = scene.lender("b")
    load = Load(scene.host("a"), [lender], 32, "--fault-timeout", "500ms", "--prefetch", "off")
    load.settle()
    load.run(1)
    load.pause()
    load.persist()
    old = lender.pages().read_bytes()
    # Each page gets a newer version, so that the old one is a lie.
    load.rewrite()
    load.persist()
    remote = sorted(load.remote())[:400]
    told = lie(lender.pages(), remote, old)
    load.verify()
    errors = load.show()["volume"]
    found = f"{len(load.lost)} of {told} lies; lease {errors['leases'][0]['state']}"
    return Row("a lender flips, swaps, replays, zeroes pages, one copy", load, found, told)


if __name__ == "__main__":
    start(drill)
