#!/usr/bin/python3 -B
"""VMs consolidated on a host (Disaggregation, section 5, Fig. 8): throughput, and throughput for its price, with 1 to 8 of them.

Emulated guests of 192 MiB, each with one processor: 48 MiB of data that all have and read every four seconds, and a program that checks and rewrites 64 MiB of its own, nine of ten times
three quarters of it, at 16 MiB a second, so that two processors are enough for eight. What it gets done of that in some seconds counts. The host is, as in the paper:
  Max      has memory for all eight
  Base     has memory for four (768 MiB); what is more goes to a disk of its own
  CBPS     is Base, and equal pages are kept once ('aquifer group scan')
  DM       has memory for four, and the rest behind a link of 4 us a page
  DM+CBPS  is DM, and equal pages are kept once here
All guests' memory is in regions, policy and scheme are the paper's (round-robin, on demand). The disk is an emulated link of 1 ms a page, one page at a time, a link for each VM: a disk would take 5 to 10; in the
paper there is none, and Base ends at 4 VMs. What is shared is counted in the host's memory: frames of the group make the limit of the caches (`aquifer region limit`) smaller. Prices are the paper's 3-year TCO
(section 5): 2434 dollars for Base and CBPS, 3618 for Max, 3052 for DM and DM+CBPS.

Guests start while memory is not limited; each number of them is measured when all of these have been at work, with memory limited, for some seconds.

Build first: cargo build --release --workspace --lib --bins --examples

Usage: lab/consolidation [--guests 1,2,4,6,8] [--seconds N] [--picture FILE.png] [--json]       (as root, on a machine that does nothing else)
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from grouping import BUILT, MIB, Lab

MEMORY = 192
SAME, OWN, HOT = 48, 64, 75
HOST = 4 * MEMORY
RATE = 16
ASKED = f"data=0 churn={OWN} hot={HOT} rate={RATE}"
PAPERS = ["--policy", "round-robin", "--scheme", "on-demand", "--one-at-a-time"]
DISK, LINK = "1ms", "4us"
# Where the rest goes, whether memory is limited, whether pages are shared, and the paper's 3-year TCO in dollars.
CONFIGURATIONS = {"Max": (LINK, False, False, 3618), "Base": (DISK, True, False, 2434), "CBPS": (DISK, True, True, 2434), "DM": (LINK, True, False, 3052), "DM+CBPS": (LINK, True, True, 3052)}
TIMEOUT = 240


class Guest:
    """What a guest says of its work, as of now."""

    def __init__(self, serial):
        self.serial, self.pages, self.wrong, self.lines = serial, 0, 0, 0
        serial.settimeout(None)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        try:
            for line in self.serial.makefile(errors="replace"):
                words = line.split()
                if len(words) == 4 and words[0] == "churn":
                    self.pages, self.wrong, self.lines = int(words[2]), int(words[3]), self.lines + 1
        except (OSError, ValueError):
            pass


def say(what: str) -> None:
    if sys.stderr.isatty():
        print(what, file=sys.stderr)


def saved(lab: Lab) -> dict:
    return lab.aquifer("group", "show", "blue")["sharing"]


def limit(lab: Lab) -> None:
    """The caches have what the frames of the group leave them."""
    lab.aquifer("region", "limit", f"{HOST - saved(lab)['frames_bytes'] // MIB - 1}M")


def run(name: str, counts: list, seconds: float, files: dict) -> list:
    link, limited, shares, _ = CONFIGURATIONS[name]
    with Lab(max(counts), files) as lab:
        lab.create_group("blue")
        guests: list = []
        found = []
        for count in counts:
            # With all memory there, as starting on a slow disk takes minutes.
            lab.aquifer("region", "limit", "none")
            while len(guests) < count:
                lab.start(f"vm{len(guests)}", "blue", ["--cache", f"{MEMORY + 8}M", "--emulate-link", link, *PAPERS], f"{ASKED} seed={len(guests)}", memory=MEMORY, cpus=1)
                guests.append(Guest(lab.serials[-1]))
            if shares and count == counts[0]:
                lab.scan(100)
            until = time.monotonic() + TIMEOUT
            while not all(guest.lines > 20 for guest in guests):
                if time.monotonic() > until:
                    sys.exit(f"{sys.argv[0]}: {name}: a guest does not get to work")
                time.sleep(0.2)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                if limited:
                    limit(lab)
                time.sleep(0.5)
            before, began = [guest.pages for guest in guests], time.monotonic()
            time.sleep(seconds)
            took = time.monotonic() - began
            # What is made up for, of the time before, does not count.
            done = sum(min(RATE * MIB / 4096, (guest.pages - pages) / took) for guest, pages in zip(guests, before))
            sharing = saved(lab)
            local = sum(lab.aquifer("region", "show", vm)["usage"]["resident"] for _, vm in lab.vms) + sharing["frames_bytes"]
            found.append({"guests": count, "pages_per_s": done, "saved_mib": sharing["saved_bytes"] / MIB, "local_mib": local / MIB, "wrong": sum(guest.wrong for guest in guests)})
            say(f"{name}: {found[-1]}")
    return found


def draw(file: str, results: dict) -> None:
    import picture

    figure, [[throughput, value]] = picture.panels("VMs consolidated on one host", 2)
    bars: tuple = ({}, {})
    for (name, found), colour in zip(results.items(), picture.COLOURS):
        bars[0][name] = ([one["throughput"] for one in found], colour, None)
        bars[1][name] = ([one["per_dollar"] for one in found], colour, None)
    groups = [f"{one['guests']} VMs" if one["guests"] > 1 else "1 VM" for one in results["Max"]]
    for panel, of, title in ((throughput, bars[0], "throughput, of Max with one VM"), (value, bars[1], "throughput for its price, of Max with one VM")):
        picture.grouped(panel, groups, of)
        panel.set(ylabel=title)
    throughput.legend(loc="upper left")
    picture.save(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guests", default="1,2,4,6,8")
    parser.add_argument("--only", metavar="CONFIGURATION", action="append", choices=CONFIGURATIONS, help="beside Max; may be given several times")
    parser.add_argument("--seconds", type=float, default=8, help="of each measurement")
    parser.add_argument("--picture", metavar="FILE.png")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    counts = sorted({int(count) for count in args.guests.split(",")})
    names = [name for name in CONFIGURATIONS if not args.only or name in args.only or name == "Max"]
    with tempfile.TemporaryDirectory(prefix="aquifer-lab-") as tmp:
        churn = Path(tmp) / "churn"
        subprocess.run(["strip", "-o", churn, BUILT / "examples/churn"], check=True)
        data = Path(tmp) / "same"
        data.write_text("".join(f"{number:015}\n" for number in range(SAME * MIB // 16)))
        files = {churn: "/bin/churn", data: "/same"}
        results = {name: run(name, counts, args.seconds, files) for name in names}
    one = results["Max"][0]["pages_per_s"] / results["Max"][0]["guests"]
    for name, found in results.items():
        for of in found:
            of["throughput"] = of["pages_per_s"] / one
            of["per_dollar"] = of["throughput"] * CONFIGURATIONS["Max"][3] / CONFIGURATIONS[name][3]
    wrong = sum(of["wrong"] for found in results.values() for of in found)
    if args.picture:
        draw(args.picture, results)
    if args.json:
        print(json.dumps(results, indent=1))
    else:
        print(f"throughput beside Max with one VM ({one:.0f} pages/s), and for its price; MiB saved by equal pages, MiB of local RAM used; {wrong} pages wrong")
        print(f"{'VMs':<10}" + "".join(f"{count:>32}" for count in counts))
        for name, found in results.items():
            print(f"{name:<10}" + "".join(f"{of['throughput']:9.2f} {of['per_dollar']:6.2f} {of['saved_mib']:7.0f} {of['local_mib']:7.0f}" for of in found))
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
