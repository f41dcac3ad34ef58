#!/usr/bin/python3 -B
"""Changes pages at one of two lenders while the load runs, as root there.

Four times, all pages that this lender has are changed: bits flipped, pages swapped, older versions
and zeroes, in turn. The load must get each page from the other lender, and see no lie.
"""

from scene.lies import lie
from scene.load import Load
from scene.row import Row, start


def drill(scene) -> Row:
    lenders = [scene.lender("b"), scene.lender("c")]
    load = Load(scene.host("a"), lenders, 32, "--protection", "mirror")
    load.wait_until_whole()
    load.settle()
    told = found = 0
    for turn in range(4):
        load.persist()
        old = lenders[0].pages().read_bytes()
        load.run(2)
        load.pause()
        load.persist()
        remote = sorted(load.remote())
        told += lie(lenders[0].pages(), remote, old)
        load.verify()
        load.run(1)
        found += len(load.events("copy_behind"))
        load.wait_until_whole()
    # What the lender has now is right again: the borrower has written it anew.
    lenders[1].kill()
    load.verify()
    return Row("one of two lenders changes all its pages, 4 times", load,
               f"{told} lies told, none shown; {found} reports", 0)


if __name__ == "__main__":
    start(drill)
