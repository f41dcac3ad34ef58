"""The load of a drill: a program with a region as its memory, which checks every byte it reads.

Reads pages at random, and writes each third one again. The content of a page names the page and
its version, so that a swapped page, an old one and one of zeroes all count as wrong. Pages are
copied by system calls: if Aquifer reports a page as lost, the call fails with EFAULT, and the load
counts the page. A plain access would end the program with SIGBUS.

Obeys one word a line on standard input, and prints one JSON object for each:
    tell      the figures since the last order
    pause     the same, and rests until the next order
    rewrite   writes a new version of every page
    verify    reads every page once; the figures of that, with the lost pages
    save FILE writes the version of each page to a file, which may be the argument of a next program
    hoard     allocates memory until the program is killed
    local     the pages that are in the RAM of this host, by mincore(2)
"""

import concurrent.futures
import ctypes
import json
import mmap
import os
import random
import select
import sys
import time

PAGE = 4096
# Pages of a lender that is gone wait for the timeout, so many wait at the same time.
THREADS = 128


def content(page: int, version: int) -> bytes:
    return (b"%08d.%07d" % (page, version)) * (PAGE // 16)


class Memory:
    """A region, in pages."""

    def __init__(self, path: str, stride: int):
        file = os.open(path, os.O_RDWR)
        size = os.fstat(file).st_size
        self.view = memoryview(mmap.mmap(file, size, mmap.MAP_SHARED))
        # The load uses each page whose number is a multiple of `stride`.
        self.pages = range(0, size // PAGE, stride)

    def local(self) -> list:
        """Returns the pages that are in the RAM of this host."""
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.view))
        present = (ctypes.c_ubyte * (len(self.view) // PAGE))()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(len(self.view)), present):
            raise OSError(ctypes.get_errno(), "mincore")
        return [page for page in self.pages if present[page] & 1]

    def page(self, page: int) -> memoryview:
        return self.view[page * PAGE:(page + 1) * PAGE]


class Window:
    """A page of scratch memory, through which one thread copies pages in and out of a region."""

    def __init__(self, memory: Memory):
        self.memory, self.file = memory, os.memfd_create("window")

    def read(self, page: int) -> bytes | None:
        """Returns the content of a page, or None if it is lost."""
        try:
            if os.pwrite(self.file, self.memory.page(page), 0) != PAGE:
                return None
        except OSError:
            return None
        return os.pread(self.file, PAGE, 0)

    def write(self, page: int, data: bytes) -> bool:
        """Writes a page, and returns whether that succeeded."""
        os.pwrite(self.file, data, 0)
        try:
            return os.preadv(self.file, [self.memory.page(page)], 0) == PAGE
        except OSError:
            return False

    def close(self) -> None:
        os.close(self.file)


class Figures:
    """What the load did since the last order."""

    def __init__(self):
        self.written = self.verified = self.wrong = self.zeroes = 0
        self.longest = self.longest_lost = 0.0
        self.began = time.monotonic()
        # Since the load began: it leaves a lost page alone.
        self.lost: set = set()

    def check(self, page: int, found: bytes | None, right: bytes, began: float) -> None:
        """Counts a page that was read. `began` is the time when the load reached for it."""
        took = time.monotonic() - began
        if found is None:
            self.lost.add(page)
            self.longest_lost = max(self.longest_lost, took)
            return
        self.longest = max(self.longest, took)
        if found == right:
            self.verified += 1
        else:
            self.wrong += 1
            self.zeroes += not any(found)

    def add(self, other: "Figures") -> None:
        self.verified += other.verified
        self.wrong += other.wrong
        self.zeroes += other.zeroes
        self.longest = max(self.longest, other.longest)
        self.longest_lost = max(self.longest_lost, other.longest_lost)
        self.lost |= other.lost

    def tell(self) -> None:
        seconds = time.monotonic() - self.began
        print(json.dumps({
            "written": self.written, "verified": self.verified, "wrong": self.wrong,
            "zeroes": self.zeroes, "lost": len(self.lost), "lost_pages": sorted(self.lost),
            "longest_ms": 1000 * self.longest, "longest_lost_ms": 1000 * self.longest_lost,
            "seconds": seconds,
        }), flush=True)


class Load:
    def __init__(self, path: str, stride: int):
        self.memory = Memory(path, stride)
        self.window = Window(self.memory)
        self.versions = dict.fromkeys(self.memory.pages, 0)
        self.figures = Figures()

    def fill(self) -> None:
        for page in self.memory.pages:
            self.write(page, 0)

    def restore(self, file: str) -> None:
        """Takes over the pages of an earlier program."""
        with open(file) as saved:
            self.versions = {int(page): version for page, version in json.load(saved).items()}

    def save(self, file: str) -> None:
        with open(file, "w") as saved:
            json.dump(self.versions, saved)
        print("{}", flush=True)

    def write(self, page: int, version: int) -> None:
        if self.window.write(page, content(page, version)):
            self.versions[page] = version
            self.figures.written += 1
        else:
            self.figures.lost.add(page)

    def step(self, number: int) -> None:
        """Reads one page, and writes it if it is its turn. Leaves pages alone that are lost."""
        page = random.choice(self.memory.pages)
        if page in self.figures.lost:
            return
        began, right = time.monotonic(), content(page, self.versions[page])
        self.figures.check(page, self.window.read(page), right, began)
        if number % 3 == 0 and page not in self.figures.lost:
            began = time.monotonic()
            self.write(page, self.versions[page] + 1)
            self.figures.longest = max(self.figures.longest, time.monotonic() - began)

    def run_until_order(self) -> str:
        number = 0
        while number % 32 or not select.select([sys.stdin], [], [], 0)[0]:
            number += 1
            self.step(number)
        return sys.stdin.readline().strip()

    def rewrite(self) -> None:
        for page in self.memory.pages:
            self.write(page, self.versions[page] + 1)
        self.tell()

    def tell(self) -> None:
        self.figures.tell()
        lost, self.figures = self.figures.lost, Figures()
        self.figures.lost = lost

    def verify(self) -> None:
        figures = Figures()
        shares = [self.memory.pages[first::THREADS] for first in range(THREADS)]

        def read(pages: range) -> Figures:
            window, share = Window(self.memory), Figures()
            for page in pages:
                began, right = time.monotonic(), content(page, self.versions[page])
                share.check(page, window.read(page), right, began)
            window.close()
            return share

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            for share in pool.map(read, shares):
                figures.add(share)
        figures.tell()


def hoard() -> None:
    hoarded = []
    while True:
        hoarded.append(bytes(1 << 20).replace(bytes(1), b"x"))


def main() -> None:
    path, stride, *saved = sys.argv[1:]
    load = Load(path, int(stride))
    if saved:
        load.restore(saved[0])
    else:
        load.fill()
    print("ready", flush=True)
    running = not saved
    while True:
        order, *file = (load.run_until_order() if running else sys.stdin.readline()).split() or [""]
        running = order == "tell"
        match order:
            case "tell" | "pause":
                load.tell()
            case "rewrite":
                load.rewrite()
            case "verify":
                load.verify()
            case "local":
                print(json.dumps(load.memory.local()), flush=True)
            case "save":
                load.save(file[0])
            case "hoard":
                hoard()
            case "":
                return
            case _:
                sys.exit(f"unknown order: {order}")


if __name__ == "__main__":
    main()
