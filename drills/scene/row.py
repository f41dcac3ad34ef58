"""The row that a drill prints, and the command line of a drill."""

import argparse
import sys

from common import bench

from scene.enclosure import enclosed
from scene.hosts import Scene

HEADINGS = ("what was done", "pages", "stall", "lost", "found")


class Row:
    """What a drill did and saw. `lost` pages gave an error; `wrong` pages were shown: always 0."""

    def __init__(self, done: str, load, found: str, expected_lost: int = 0):
        self.done, self.found = done, found
        self.written, self.verified, self.wrong = load.written, load.verified, load.wrong
        self.stall_ms, self.lost, self.expected_lost = load.stall_ms, len(load.lost), expected_lost

    def is_right(self) -> bool:
        return self.wrong == 0 and self.lost == self.expected_lost and self.verified > 0

    def values(self) -> dict:
        return vars(self) | {"right": self.is_right()}


class Skip(Exception):
    """Ends a drill that this machine cannot run; the text says why."""


def start(drill) -> None:
    """Runs a drill in a scene and a PID namespace of its own, and prints its row."""
    description = sys.modules["__main__"].__doc__
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.parse_args()

    def main() -> None:
        given = bench.parse(parser)
        try:
            with Scene() as scene:
                row = drill(scene).values()
        except Skip as why:
            row = {"skipped": str(why), "right": True}
        bench.finish(row, report)
        sys.exit(0 if row["right"] or given.json else 1)

    enclosed(lambda: bench.start(main))


def report(row: dict) -> None:
    for heading, cell in zip(HEADINGS, cells(row)):
        print(f"{heading:<16}{cell}")


def cells(row: dict) -> list:
    """Returns the text of each column."""
    if "done" not in row:
        return [f"skipped: {row['skipped']}" if "skipped" in row else row["failed"], "", "", "", ""]
    lost = str(row["lost"])
    if row["lost"] != row["expected_lost"]:
        lost += f", not {row['expected_lost']}"
    if row["wrong"]:
        lost += f", {row['wrong']} WRONG"
    return [
        row["done"], f"{row['written']} written, {row['verified']} verified",
        f"{row['stall_ms']:.0f} ms", lost, row["found"],
    ]
