#!/usr/bin/python3 -B
"""Restores an old backup of the pages at one of two lenders, which then comes back.

It has a valid version of every page, but an old one. No program may see one of these.
"""

import shutil

from scene import Failed
from scene.load import Load
from scene.row import Row, start


def drill(scene) -> Row:
    lenders = [scene.lender("b"), scene.lender("c")]
    load = Load(scene.host("a"), lenders, 32, "--protection", "mirror")
    load.wait_until_whole()
    load.settle()
    stale, backup = lenders[0], scene.work / "backup"
    load.run(1)
    load.persist()
    shutil.copyfile(stale.pages(), backup)
    load.run(2)
    stale.kill()
    load.run(1)
    shutil.copyfile(backup, stale.pages())
    stale.start()
    load.run(4)
    load.verify()
    events = load.events("copy_behind")
    lies = [event for event in events if "it returned" in event["why"]]
    if not lies:
        raise Failed("no read met an old page")
    return Row("a lender of two copies comes back with an old backup", load,
               f"old pages by their tags ({len(lies)} of the last {len(events)} reports); "
               "each is written anew")


if __name__ == "__main__":
    start(drill)
