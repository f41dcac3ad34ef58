"""A region on the borrower, and the load that checks every byte of it."""

import json
import select
import subprocess
import time
from pathlib import Path

from scene import AQUIFER, PYTHON, Failed, wait

PROGRAM = Path(__file__).parent / "program.py"
# Seconds for one answer of the load: a lender may be away meanwhile.
ANSWER = 180


class Load:
    """A region over some lenders, with a quarter of it in the borrower's RAM, and its program."""

    def __init__(self, host, lenders: list, mib: int, *words, cache_mib: int = 0, stride: int = 1):
        self.host, self.name = host, "load"
        self.written = self.verified = self.wrong = 0
        self.stall_ms = 0.0
        self.lost: set = set()
        self.pages = range(0, mib << 8, stride)
        uris = [
            word for lender in lenders
            for word in ("--lender", lender if isinstance(lender, str) else lender.uri)
        ]
        tls = ["--tls", host.tls] if lenders else []
        words = [
            "region", "create", self.name, "--size", f"{mib}M",
            "--cache", f"{cache_mib or mib // 4}M", *uris, *tls, *words,
        ]
        made: dict = {}

        def is_made() -> bool:
            # An agent that has just started knows after a moment what the others lend.
            try:
                made.update(host.aquifer(*words))
            except Failed as failed:
                if "has not answered yet" in str(failed):
                    return False
                raise
            return True
        wait("the region", is_made)
        self.file, self.stride = made["file"], stride
        self.program = self.start()

    def start(self, *words) -> subprocess.Popen:
        program = self.host.launch(
            AQUIFER, "region", "exec", "--", PYTHON, "-B", PROGRAM, self.file, self.stride, *words,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        if program.stdout.readline() != "ready\n":
            raise Failed("the load did not start")
        return program

    def order(self, order: str) -> None:
        print(order, file=self.program.stdin, flush=True)

    def save(self, file: Path) -> None:
        """Writes the version of each page to a file, for the next program. The load rests."""
        self.ask(f"save {file}")

    def ask(self, order: str):
        """Gives the load an order, and returns its answer."""
        self.order(order)
        return self.answer(order)

    def answers_within(self, seconds: float) -> bool:
        return bool(select.select([self.program.stdout], [], [], seconds)[0])

    def answer(self, order: str):
        """Returns the answer to an order that was given."""
        if not self.answers_within(ANSWER):
            raise Failed(f"HANG: the load did not answer '{order}' within {ANSWER} s")
        line = self.program.stdout.readline()
        if not line:
            raise Failed(f"the load ended with {self.program.wait()} before it answered '{order}'")
        return json.loads(line)

    def figures(self, order: str) -> dict:
        """Gives the load an order, and adds the figures in its answer to those of the drill."""
        return self.add(self.ask(order))

    def add(self, said: dict) -> dict:
        self.written += said["written"]
        self.verified += said["verified"]
        self.wrong += said["wrong"]
        self.lost |= set(said["lost_pages"])
        return said

    def run(self, seconds: float) -> dict:
        """Lets the load run, and returns its figures of this time."""
        time.sleep(seconds)
        said = self.figures("tell")
        self.stall_ms = max(self.stall_ms, said["longest_ms"])
        return said

    def run_stuck(self, seconds: float, mend) -> dict:
        """Fails if the load goes on within this time. Then calls `mend`, waits until the load goes
        on, and returns its figures."""
        self.order("tell")
        if self.answers_within(seconds):
            raise Failed("the load got its pages: what the drill broke had no effect")
        mend()
        said = self.add(self.answer("tell"))
        self.stall_ms = max(self.stall_ms, said["longest_ms"])
        return said

    def settle(self) -> None:
        """Drops the figures of the start from the longest stall."""
        self.figures("tell")

    def pause(self) -> dict:
        said = self.figures("pause")
        self.stall_ms = max(self.stall_ms, said["longest_ms"])
        return said

    def rewrite(self) -> dict:
        """Writes every page once. The load then rests."""
        return self.figures("rewrite")

    def verify(self) -> dict:
        """Reads every page once. The load then rests."""
        return self.figures("verify")

    def remote(self) -> set:
        """Returns the pages that are not in the borrower's RAM. The load rests."""
        self.pause()
        self.wait_until_still()
        return set(self.pages) - set(self.ask("local"))

    def wait_until_still(self) -> None:
        """Waits until the engine evicts nothing: it keeps some frames free, a moment later."""
        last = None

        def is_still() -> bool:
            nonlocal last
            before, last = last, self.show()["counts"]["evicted"]
            return before == last
        wait("the engine to rest", is_still, pause=0.5)

    def persist(self) -> None:
        """Writes all dirty pages to the lenders."""
        self.host.aquifer("region", "persist", self.name)

    def show(self) -> dict:
        return self.host.aquifer("region", "show", self.name)

    def wait_for_engine_after(self, engine: int) -> None:
        """Waits until the engine with this process id has a successor."""
        def is_next() -> bool:
            try:
                return self.show()["pid"] != engine
            except Failed:
                return False
        wait("the next engine", is_next)

    def leases(self) -> list:
        return self.show()["volume"]["leases"]

    def borrowed(self) -> list:
        """Returns each lease with its lender and its state."""
        return sorted((lease["lease"], lease["lender"], lease["state"]) for lease in self.leases())

    def must_have_borrowed(self, before: list) -> None:
        """Fails if a lease has ended, or is new."""
        if (now := self.borrowed()) != before:
            raise Failed(f"the load had the leases {before}, and now {now}")

    def is_whole(self) -> bool:
        """Returns whether both copies of each page are complete."""
        copies = [lease["copy"] for lease in self.leases()]
        return all(
            copy["answer"] == [True, True] and copy["lacks"] + copy["first_lacks"] == 0
            for copy in copies
        )

    def wait_until_whole(self, timeout: float = 60) -> float:
        """Waits for the end of the repair, and returns its seconds."""
        began = time.monotonic()
        wait("both copies are whole", self.is_whole, timeout)
        return time.monotonic() - began

    def disk_copy(self) -> dict:
        """Returns the state of the copy on the borrower's disk."""
        [lease] = self.leases()
        return lease["disk"]

    def wait_until_on_disk(self, timeout: float = 60) -> float:
        """Waits until the disk has all that the lender has, and returns the seconds."""
        began = time.monotonic()

        def is_whole() -> bool:
            copy = self.disk_copy()
            return not copy["lacks"] + copy["lender_lacks"] and "paused" not in copy
        wait("the disk has all pages", is_whole, timeout)
        return time.monotonic() - began

    def events(self, kind: str) -> list:
        return [event for event in self.show()["volume"]["events"] if event["event"] == kind]


class Sum:
    """The figures of several loads."""

    def __init__(self, loads: list):
        self.written = sum(load.written for load in loads)
        self.verified = sum(load.verified for load in loads)
        self.wrong = sum(load.wrong for load in loads)
        self.stall_ms = max(load.stall_ms for load in loads)
        self.lost = set().union(*({(at, page) for page in load.lost}
                                  for at, load in enumerate(loads)))
