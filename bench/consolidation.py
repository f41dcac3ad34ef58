#!/usr/bin/python3 -B
"""Measures the throughput of 1 to 8 VMs on a host, and throughput for its price ([Lim12] Fig. 8).

Emulated guests of 192 MiB have one processor each. All have the same 48 MiB of data, and read it
every four seconds. A program in each checks and rewrites 64 MiB of its own, nine of ten times in
three quarters of it, at 16 MiB a second at most, so that two processors are enough for eight. The
throughput is the program's progress in some seconds. As in the paper, the host is one of:
  Max      has memory for all eight
  Base     has memory for four (768 MiB); the rest goes to a disk
  CBPS     is Base, and equal pages are kept once ('aquifer serve dedup')
  DM       has memory for four; the rest is behind a link of 4 us a page
  DM+CBPS  is DM, and equal pages are kept once on this host

All guests' memory is in regions. Policy and scheme are the paper's (round-robin, on demand). The
disk is an emulated link of 1 ms a page, one page at a time, one link for each VM. A disk would take
5 to 10 ms. The paper has no disk, and Base ends at 4 VMs. The host's memory holds shared pages too:
the group's frames reduce the limit of the caches (`aquifer region set-limit`). Prices are the
paper's 3-year TCO (section 5): 2434 dollars for Base and CBPS, 3618 for Max, 3052 for DM and
DM+CBPS.

Guests start while memory is not limited. Each number of them is measured once all have worked for
some seconds with limited memory. Build first:
    cargo build --release --workspace --lib --bins --examples

Usage: bench/consolidation.py [--rounds N] [--guests 1,2,4,6,8] [--only CONFIGURATION]
    [--seconds N] [--picture FILE.png] [--json]      (as root, on an otherwise idle machine)
"""

import sys
import tempfile
import threading
import time
from pathlib import Path

from common import bench
from common.bench import EXAMPLES, MIB, PAGE, note, wait
from common.grouping import GroupHost

MEMORY = 192
SAME, OWN, HOT = 48, 64, 75
HOST = 4 * MEMORY
RATE = 16
ASKED = f"data=0 churn={OWN} hot={HOT} rate={RATE}"
PAPERS = ["--policy", "round-robin", "--scheme", "on-demand", "--one-at-a-time"]
DISK, LINK = "1ms", "4us"
# The place of the rest, whether memory is limited, whether pages are shared, and the 3-year TCO.
CONFIGURATIONS = {
    "Max": (LINK, False, False, 3618),
    "Base": (DISK, True, False, 2434),
    "CBPS": (DISK, True, True, 2434),
    "DM": (LINK, True, False, 3052),
    "DM+CBPS": (LINK, True, True, 3052),
}
TIMEOUT = 240


class Guest:
    """The progress of a guest's program so far."""

    def __init__(self, serial):
        self.serial, self.pages, self.wrong, self.lines = serial, 0, 0, 0
        serial.settimeout(None)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        try:
            for line in self.serial.makefile(errors="replace"):
                words = line.split()
                if len(words) == 4 and words[0] == "churn":
                    self.pages, self.wrong = int(words[2]), int(words[3])
                    self.lines += 1
        except (OSError, ValueError):
            pass


def sharing(host: GroupHost) -> dict:
    return host.aquifer("group", "show", "blue")["sharing"]


def limit(host: GroupHost) -> None:
    """Limits the caches to the memory that the group's frames leave."""
    frames = sharing(host)["frames_bytes"] // MIB
    host.aquifer("region", "set-limit", "--cache", f"{HOST - frames - 1}M")


def measure(host: GroupHost, guests: list, seconds: float) -> dict:
    before, began = [guest.pages for guest in guests], time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    # A guest that was slow before may catch up now; what exceeds its rate does not count.
    progress = [(guest.pages - pages) / took for guest, pages in zip(guests, before)]
    shared = sharing(host)
    resident = [host.aquifer("region", "show", vm)["usage"]["resident"] for _, vm in host.vms]
    return {
        "pages_per_s": sum(min(RATE * MIB / PAGE, rate) for rate in progress),
        "saved_mib": shared["saved_bytes"] / MIB,
        "local_mib": (sum(resident) + shared["frames_bytes"]) / MIB,
        "wrong": sum(guest.wrong for guest in guests),
    }


def run(name: str, counts: list, seconds: float, files: dict) -> dict:
    """Returns the figures of a configuration, by number of guests."""
    link, limited, shares, _ = CONFIGURATIONS[name]
    with GroupHost(max(counts), files) as host:
        host.create_group("blue")
        guests: list = []
        found = {}
        for count in counts:
            # Without a limit, as guests take minutes to start on a slow disk.
            host.aquifer("region", "set-limit", "--cache", "none")
            while len(guests) < count:
                where = ["--cache", f"{MEMORY + 8}M", "--emulate-link", link, *PAPERS]
                host.start(
                    f"vm{len(guests)}", "blue", where, f"{ASKED} seed={len(guests)}",
                    memory=MEMORY, cpus=1,
                )
                guests.append(Guest(host.serials[-1]))
            if shares and count == counts[0]:
                host.scan(100)
            at_work = lambda: all(guest.lines > 20 for guest in guests)
            wait(f"{name}: all guests to work", at_work, TIMEOUT, 0.2)
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                if limited:
                    limit(host)
                time.sleep(0.5)
            found[str(count)] = measure(host, guests, seconds)
            note(f"{name}, {count} VMs: {found[str(count)]}")
    return found


def compare(results: dict) -> None:
    """Adds throughput beside Max with one VM, and the same for its price."""
    count, first = next(iter(results["Max"].items()))
    one, price = first["pages_per_s"] / int(count), CONFIGURATIONS["Max"][3]
    for name, found in results.items():
        for of in found.values():
            of["throughput"] = of["pages_per_s"] / one
            of["per_dollar"] = of["throughput"] * price / CONFIGURATIONS[name][3]


def wrong_pages(result: dict) -> int:
    configurations = [found for results in result["rounds"] for found in results.values()]
    return sum(of["wrong"] for found in configurations for of in found.values())


def draw(file: str, results: dict) -> None:
    from common import picture

    title = "VMs consolidated on one host"
    figure, [[throughput, value]] = picture.panels(title, 2)
    groups = [f"{count} VMs" if count != "1" else "1 VM" for count in results["Max"]]
    for panel, key, title in (
        (throughput, "throughput", "throughput, of Max with one VM"),
        (value, "per_dollar", "throughput for its price, of Max with one VM"),
    ):
        bars = {
            name: ([of[key] for of in found.values()], colour, None)
            for (name, found), colour in zip(results.items(), picture.COLOURS)
        }
        picture.grouped(panel, groups, bars)
        panel.set(ylabel=title)
    throughput.legend(loc="upper left")
    picture.save(figure, file)


def report(result: dict) -> None:
    for results in result["rounds"]:
        print(
            "throughput beside Max with one VM, and for its price; MiB saved by equal pages, "
            f"MiB of local RAM used; {wrong_pages(result)} pages wrong"
        )
        print(f"{'VMs':<10}" + "".join(f"{count:>32}" for count in results["Max"]))
        for name, found in results.items():
            cells = (
                f"{of['throughput']:9.2f} {of['per_dollar']:6.2f} {of['saved_mib']:7.0f} "
                f"{of['local_mib']:7.0f}"
                for of in found.values()
            )
            print(f"{name:<10}" + "".join(cells))


def main() -> None:
    parser = bench.arguments(__doc__, rounds=1, picture=True)
    parser.add_argument("--guests", default="1,2,4,6,8", help="numbers of guests")
    parser.add_argument(
        "--only", metavar="CONFIGURATION", action="append", choices=CONFIGURATIONS,
        help="beside Max; may be given several times",
    )
    parser.add_argument("--seconds", type=float, default=8, help="of each measurement")
    args = bench.parse(parser)
    counts = sorted({int(count) for count in args.guests.split(",")})
    only = {"Max", *(args.only or CONFIGURATIONS)}
    names = [name for name in CONFIGURATIONS if name in only]
    rounds = []
    with tempfile.TemporaryDirectory(prefix="aquifer-bench-") as directory:
        churn = Path(directory) / "churn"
        bench.run("strip", "-o", churn, EXAMPLES / "churn")
        data = Path(directory) / "same"
        lines = (f"{number:015}\n" for number in range(SAME * MIB // 16))
        data.write_text("".join(lines))
        files = {churn: "/bin/churn", data: "/same"}
        for _ in range(args.rounds):
            rounds.append({name: run(name, counts, args.seconds, files) for name in names})
            compare(rounds[-1])
    result = {"rounds": rounds}
    if args.picture:
        draw(args.picture, rounds[-1])
    bench.finish(result, report)
    if wrong_pages(result):
        sys.exit(1)


if __name__ == "__main__":
    bench.start(main)
