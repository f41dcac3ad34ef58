#!/usr/bin/python3 -B
"""Checks whether a write's time tells a tenant what another tenant has ([Kim14] section 3.4).

Two groups, each with a scanner and two regions. The attacker's region has pages equal to pages of
the other group, where they are shared; pages that no other region has; and pages equal to pages of
another region of its own group. Once all equal pages are merged, and each page was scanned three
more times, it writes a byte to each page in random order.

AUC is how often a page of a kind takes longer than a page that no other region has. It is 0.5 if
the kinds cannot be told apart (Mann and Whitney). The script also prints 1.96 times its standard
deviation by chance. Build first:
    cargo build --release --workspace --bins

Usage: bench/isolation.py [--rounds N] [--json]      (as root)
"""

import json
import math
import statistics
import subprocess
import sys

from common import bench
from common.bench import AQUIFER, PAGE, PYTHON, ROOT, Failed, end
from common.lender import Lender

PROGRAM = (ROOT / "crates/cli/tests/cli/region/framework/guess.py").read_text()
KINDS = ("another group's", "no other region's", "its own group's")
PAGES = 2048
# Name, group and the seeds of the three kinds of pages.
REGIONS = [
    ("victim", "blue", "1 7 8"), ("twin", "blue", "1 9 10"), ("mate", "red", "11 12 3"),
    ("attacker", "red", "1 2 3"),
]


def auc(these: list, those: list) -> float:
    """Returns how often one of these is longer than one of those; equal ones count half."""
    longer = shorter = 0.0
    both = sorted([(time, True) for time in these] + [(time, False) for time in those])
    at = 0
    while at < len(both):
        equal = at
        ours = others = 0
        while equal < len(both) and both[equal][0] == both[at][0]:
            mine = both[equal][1]
            ours, others, equal = ours + mine, others + (not mine), equal + 1
        longer += ours * (shorter + others / 2)
        shorter += others
        at = equal
    return longer / (len(these) * len(those))


class Region:
    """A region of a group, and the program that maps it."""

    def __init__(self, lender: Lender, name: str, group: str, seeds: str):
        self.seeds = seeds
        more = ("--group", group, "--groups", lender.dir / "groups")
        file = lender.create(name, 3 * PAGES * PAGE // bench.MIB, 32 << 10, "1us", more)
        self.process = subprocess.Popen(
            [AQUIFER, "region", "exec", "--", PYTHON, "-c", PROGRAM, file],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=lender.env(),
            start_new_session=True,
        )
        self.process.stdout.readline()

    def tell(self, order: str) -> str:
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


def scanner(lender: Lender, group: str) -> subprocess.Popen:
    command = [
        AQUIFER, "--json", "serve", "dedup", group, "--scan", "400", "--report", "100ms",
        "--groups", lender.dir / "groups",
    ]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=lender.env(), start_new_session=True
    )


def wait_until_merged(process: subprocess.Popen) -> None:
    """Waits until all is shared, and three passes more."""
    saved = passes = 0
    for line in process.stdout:
        report = json.loads(line)
        if report["saved_bytes"] != PAGES * PAGE:
            saved = 0
        elif not saved:
            saved, passes = 1, report["passes"] + 3
        elif report["passes"] >= passes:
            return
    raise Failed("a scanner has ended")


def run(lender: Lender, rounds: int) -> tuple:
    """Returns nanoseconds by kind, of each round, and the number of wrong pages of the others."""
    for group in ("blue", "red"):
        lender.aquifer("group", "create", group, "--groups", lender.dir / "groups")
    started: list = []
    try:
        regions: list = []
        for of in REGIONS:
            regions.append(Region(lender, *of))
            started.append(regions[-1].process)
        scanners = [scanner(lender, group) for group in ("blue", "red")]
        started += scanners
        times, wrong = [], 0
        for _ in range(rounds):
            for region in regions:
                region.tell(f"fill {region.seeds}")
            for process in scanners:
                wait_until_merged(process)
            times.append(json.loads(regions[-1].tell("guess")))
            for region in regions[:-1]:
                wrong += int(region.tell(f"check {region.seeds}").split()[1])
        return times, wrong
    finally:
        for process in started:
            end(process)


def report(result: dict) -> None:
    rounds = len(next(iter(result["found"].values()))["auc"])
    print(
        f"{PAGES} pages of each kind, {rounds} rounds; {result['wrong']} pages of others wrong; "
        f"by chance an AUC is 0.5 +- {result['chance']:.3f}"
    )
    for name, of in result["found"].items():
        median, p90 = of["median_us"], of["p90_us"]
        area = bench.spread_text(bench.spread(of["auc"]), 3)
        print(f"{name:<20} half within {median:6.2f} us, 90 % within {p90:6.2f} us; AUC {area}")


def main() -> None:
    args = bench.parse(bench.arguments(__doc__, rounds=5))
    lender = Lender("isolation", 64)
    try:
        times, wrong = run(lender, args.rounds)
    finally:
        lender.close()
    chance = 1.96 * math.sqrt((2 * PAGES + 1) / (12 * PAGES * PAGES))
    found = {}
    for kind, name in enumerate(KINDS):
        all_times = sorted(time for of in times for time in of[kind])
        found[name] = {
            "median_us": statistics.median(all_times) / 1e3,
            "p90_us": all_times[len(all_times) * 9 // 10] / 1e3,
            "auc": [auc(of[kind], of[1]) for of in times],
        }
    result = {"pages": PAGES, "chance": chance, "wrong": wrong, "found": found}
    bench.finish(result, report)
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    bench.start(main)
