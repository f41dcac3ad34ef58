"""What root on a lender does to the pages of a region there."""

import os

PAGE = 4096
# Each lie concerns every fourth page that the lender has.
LIES = ("flip", "swap", "replay", "zero")


def page_of(file: int, page: int) -> bytes:
    return os.pread(file, PAGE, page * PAGE)


def lie(path, pages: list, old: bytes) -> int:
    """Changes these pages in the lender's file: one bit, the place, the version, or all of it.
    `old` is what the file had earlier. Returns how many pages differ from before."""
    file = os.open(path, os.O_RDWR)
    right = {page: page_of(file, page) for page in pages}
    told = 0
    for number, page in enumerate(pages):
        kind = LIES[number % len(LIES)]
        if kind == "flip":
            wrong = bytearray(right[page])
            wrong[number % PAGE] ^= 1 << number % 8
        elif kind == "swap":
            wrong = right[pages[number - 1]]
        elif kind == "replay":
            wrong = old[page * PAGE:(page + 1) * PAGE]
        else:
            wrong = bytes(PAGE)
        told += wrong != right[page]
        os.pwrite(file, wrong, page * PAGE)
    os.close(file)
    return told
