#!/usr/bin/python3 -B
"""Searches the memory and the files of a lender for what the load wrote, as root there.

A second lender has the pages of a region with `--unencrypted`. There the same search must find
them, or it would prove nothing.
"""

import re
from pathlib import Path

from scene import Failed
from scene.load import Load, Sum
from scene.row import Row, start

# Two repetitions of what the load writes.
PLAIN = re.compile(rb"(\d{8}\.\d{7})\1")


def memory(process: int):
    """Yields the readable mappings of a process."""
    with open(f"/proc/{process}/mem", "rb", buffering=0) as file:
        for line in Path(f"/proc/{process}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            begin, end = (int(word, 16) for word in span.split("-"))
            if "r" not in rights:
                continue
            try:
                file.seek(begin)
                yield file.read(end - begin)
            except (OSError, ValueError, OverflowError):
                pass


def plain_pages(lender) -> int:
    """Returns how many pieces of plain content a search of the lender finds."""
    parts = [path.read_bytes() for path in lender.folder().iterdir()]
    found = sum(len(PLAIN.findall(part)) for part in parts)
    return found + sum(len(PLAIN.findall(part)) for part in memory(lender.process.pid))


def drill(scene) -> Row:
    lenders = [scene.lender("b"), scene.lender("c")]
    loads = [
        Load(scene.host("a"), lenders[:1], 32),
        Load(scene.host("d"), lenders[1:], 32, "--unencrypted"),
    ]
    for load in loads:
        load.settle()
        load.run(2)
    found, control = (plain_pages(lender) for lender in lenders)
    if found or not control:
        raise Failed(f"{found} pieces found encrypted, {control} unencrypted")
    for load in loads:
        load.run(1)
        load.verify()
    return Row("root on a lender searches its memory and files", Sum(loads),
               f"nothing; {control} pieces where pages are not encrypted")


if __name__ == "__main__":
    start(drill)
