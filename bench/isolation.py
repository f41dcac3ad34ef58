#!/usr/bin/python3 -B
"""Whether a tenant can tell by the time of a write what another tenant has on the same host (Groups, section 3.4).

Two groups, each with a scanner and two regions. The attacker's region has pages as the other group has them (twice, so that they are kept once there), pages as nobody has them, and
pages as another region of its own group has them. When all is merged that will be, and every page was looked at three times more, it writes a byte to each page, in an order by chance.
AUC: how often a page of a kind takes longer than one that nobody has; 0.5 if nothing tells them apart (Mann and Whitney), beside 1.96 times what chance makes of that.

Build first: cargo build --release --workspace --bins

Usage: lab/isolation [--rounds N] [--json]       (as root)
"""

import argparse
import json
import math
import statistics
import subprocess
import sys

from lender import AQUIFER, ROOT, Lender, end

PROGRAM = (ROOT / "crates/cli/tests/cli/region/framework/guess.py").read_text()
KINDS = ("as another group's", "as nobody's", "as one of its own group's")
PAGES = 2048


def auc(these: list, those: list) -> float:
    """How often one of these is longer than one of those; equal ones count half."""
    longer = shorter = 0.0
    both = sorted([(time, True) for time in these] + [(time, False) for time in those])
    at = 0
    while at < len(both):
        equal = at
        ours = others = 0
        while equal < len(both) and both[equal][0] == both[at][0]:
            ours, others, equal = ours + both[equal][1], others + (not both[equal][1]), equal + 1
        longer += ours * (shorter + others / 2)
        shorter += others
        at = equal
    return longer / (len(these) * len(those))


class Region:
    """A region of a group, and the program that has it."""

    def __init__(self, lab: Lender, name: str, group: str, seeds: str):
        self.seeds = seeds
        file = lab.create(name, 3 * PAGES * 4 // 1024, 32 << 10, "1us", ("--group", group, "--groups", lab.dir / "groups"))
        self.process = subprocess.Popen([AQUIFER, "region", "exec", "--", "/usr/bin/python3", "-c", PROGRAM, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=lab.env(), start_new_session=True)
        self.process.stdout.readline()

    def tell(self, order: str) -> str:
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


def scanner(lab: Lender, group: str):
    return subprocess.Popen([AQUIFER, "--json", "group", "scan", group, "--scan", "400", "--report", "100ms", "--groups", lab.dir / "groups"], stdout=subprocess.PIPE, text=True,
                            env=lab.env(), start_new_session=True)


def until_merged(process) -> None:
    saved = passes = 0
    for line in process.stdout:
        report = json.loads(line)
        if report["saved_bytes"] != PAGES * 4096:
            saved = 0
        elif not saved:
            saved, passes = 1, report["passes"] + 3
        elif report["passes"] >= passes:
            return
    sys.exit(f"{sys.argv[0]}: a scanner has ended")


def run(lab: Lender, rounds: int) -> tuple:
    """Nanoseconds by kind, of each round; and how many pages were wrong that others write to in vain."""
    for group in ("blue", "red"):
        lab.aquifer("group", "create", group, "--groups", lab.dir / "groups")
    started: list = []
    try:
        wanted = [("victim", "blue", "1 7 8"), ("twin", "blue", "1 9 10"), ("mate", "red", "11 12 3"), ("attacker", "red", "1 2 3")]
        regions = [Region(lab, *of) for of in wanted]
        started = [region.process for region in regions]
        scanners = [scanner(lab, group) for group in ("blue", "red")]
        started += scanners
        times, wrong = [], 0
        for _ in range(rounds):
            for region in regions:
                region.tell(f"fill {region.seeds}")
            for process in scanners:
                until_merged(process)
            times.append(json.loads(regions[-1].tell("guess")))
            wrong += sum(int(region.tell(f"check {region.seeds}").split()[1]) for region in regions[:-1])
        return times, wrong
    finally:
        for process in started:
            end(process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    lab = Lender("isolation", 64)
    try:
        times, wrong = run(lab, args.rounds)
    finally:
        lab.close()
    chance = 1.96 * math.sqrt((2 * PAGES + 1) / (12 * PAGES * PAGES))
    found = {}
    for kind, name in enumerate(KINDS):
        all_of_them = sorted(time for round_of in times for time in round_of[kind])
        ranks = [auc(round_of[kind], round_of[1]) for round_of in times]
        found[name] = {"median_us": statistics.median(all_of_them) / 1e3, "p90_us": all_of_them[len(all_of_them) * 9 // 10] / 1e3, "auc": ranks}
    if args.json:
        print(json.dumps({"pages": PAGES, "chance": chance, "wrong": wrong, "found": found}))
    else:
        print(f"{PAGES} pages of each kind, {args.rounds} rounds; {wrong} pages of others wrong; by chance an AUC is 0.5 +- {chance:.3f}")
        for name, of in found.items():
            print(f"{name:<28} half within {of['median_us']:6.2f} us, 90 % within {of['p90_us']:6.2f} us; AUC {statistics.median(of['auc']):.3f} ({min(of['auc']):.3f} to {max(of['auc']):.3f})")
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
