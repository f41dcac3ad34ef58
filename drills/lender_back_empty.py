#!/usr/bin/python3 -B
"""Boots the host of one of two lenders: it comes back at its address without any page.

The borrower must not believe its zeroes, and the load goes on with the other copy.
"""

from scene import Failed
from scene.load import Load
from scene.row import Row, start


def drill(scene) -> Row:
    lenders = [scene.lender("b"), scene.lender("c")]
    load = Load(scene.host("a"), lenders, 32, "--protection", "mirror")
    load.wait_until_whole()
    load.settle()
    load.run(1)
    lenders[0].kill()
    lenders[0].forget()
    load.run(1)
    lenders[0].start()
    load.run(3)
    load.verify()
    copy = load.leases()[0]["copy"]
    if copy["answer"] != [False, True]:
        raise Failed(f"the borrower believes the empty lender: {copy}")
    return Row("a lender of two copies boots, and comes back empty", load,
               f"the lender stays out; {copy['first_lacks'] >> 20} MiB have one copy now")


if __name__ == "__main__":
    start(drill)
