#!/usr/bin/python3 -B
"""Changes pages at one of two lenders while the load runs, as root there.

Four times, all pages that this lender has are changed: bits flipped, pages swapped, older versions
and zeroes, in turn. The load must get each page from the other lender, and see no lie.
"""

from scene import Failed
from scene.lies import lie
from scene.load import Load
from scene.row import Row, start


def drill(scene) -> Row:
    lenders = [scene.lender("b"), scene.lender("c")]
    load = Load(scene.host("a"), lenders, 32, "--protection", "mirror")
    load.wait_until_whole()
    load.settle()
    told, reports = 0, set()
    for turn in range(4):
        load.persist()
        old = lenders[0].pages().read_bytes()
        load.run(2)
        load.pause()
        load.persist()
        remote = sorted(load.remote())
        lies = lie(lenders[0].pages(), remote, old)
        if not lies:
            raise Failed("no page of the lender was changed")
        told += lies
        load.verify()
        load.run(1)
        reports |= reported(load)
        load.wait_until_whole()
    find_the_rest(load, reports)
    # What the lender has now is right again: the borrower has written it anew.
    lenders[1].kill()
    load.verify()
    if not reports:
        raise Failed(f"{told} lies were told, and none was reported")
    return Row("one of two lenders changes all its pages, 4 times", load,
               f"{told} lies told, none shown; {len(reports)} reports", 0)


def reported(load) -> set:
    return {event["number"] for event in load.events("copy_behind")}


def find_the_rest(load, reports: set) -> None:
    """Reads all pages until two readings in turn find no lie. While the lender seems to be slow, a
    page comes from the other one, and no read finds the lie."""
    silent = 0
    while silent < 2:
        load.verify()
        load.wait_until_whole()
        new = reported(load) - reports
        reports |= new
        silent = 0 if new else silent + 1


if __name__ == "__main__":
    start(drill)
