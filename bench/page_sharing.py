#!/usr/bin/python3 -B
"""Equal pages of a tenant's VMs on one host: found by 'aquifer group scan', beside the kernel's own KSM, with the same guests in one run (emulated).

Each guest has 48 MiB that all have and 16 MiB that none other has, beside its kernel and its root file system. First QEMU's own memory with KSM at full speed
(`pages_to_scan` 1000, `sleep_millisecs` 0), which merges across all processes that ask for it; then VMs of one group, their memory in regions with all of it
here, and the group's scanner as fast as it can. Both go on until what is saved has not grown by 1 % for 3 s. "Saved" is by how much what the guests take has
fallen: for KSM their proportional set size, for a group the blocks of regions and frames. CPU is what finds and merges pages: ksmd; or the scanner, the engines, and the
threads of QEMU that map pages. Wanted: at least 90 % of what KSM saves, and as many pages looked at per CPU second (aim: 3 times).

`rates`: how the scanner's rate follows what the group does (Groups, Figures 5 to 7), by Adaptive-C, -CS and -CSD, and 20 pages/ms all the time: guests that idle, then have all
processors busy, and then have a cache that is too small for what they read beside that.

`loss`: what is not saved because groups are apart (Groups, Table 1): four guests as one group, as two groups of two, and each as a group of its own; by what the guests of the first
two and those of the last two have.

`pool`: two hosts (run directories of their own) with a VM of one group each, and one lender that both use: what both have with it, and what that takes; sealed deterministically, at
random, and as two groups.

Build first: cargo build --release --workspace --lib --bins --examples

Usage: lab/groups ksm|rates|loss|pool [--guests N] [--rounds N] [--picture FILE.png] [--json]       (as root, on a machine that does nothing else)
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from grouping import AQUIFER, LOCAL, MIB, PAGE, Lab, until_settled

# What guests have beside kernel and root file system, which are the same in all: what a group's have.
COMBINATIONS = {"nothing, nothing": (0, 0), "data, nothing": (1, 0), "the same data": (1, 1), "other data": (1, 200000001)}
ARRANGEMENTS = {"one group": "aaaa", "two groups": "aabb", "each alone": "abcd"}


def saved_by(lab: Lab, groups: str, data: tuple) -> dict:
    """What four guests in these groups save, zeroes and the rest, when nothing more is found."""
    for group in sorted(set(groups)):
        lab.create_group(group)
    for guest, group in enumerate(groups):
        lab.start(f"vm{guest}", group, LOCAL, f"data={data[guest // 2]}")
    lab.until_full()
    time.sleep(2)
    scanners = [lab.scan(100000, group, "200ms") for group in sorted(set(groups))]
    last: list = [{"saved_bytes": 0, "zero": 0} for _ in scanners]

    def saved() -> int:
        for at, scanner in enumerate(scanners):
            line = scanner.stdout.readline()
            if not line:
                sys.exit(f"{sys.argv[0]}: a scanner has ended")
            last[at] = json.loads(line)
        return sum(one["saved_bytes"] + one["zero"] * PAGE for one in last)

    until_settled(saved, lambda: 0)
    lab.end()
    return {"mib": sum(one["saved_bytes"] for one in last) / MIB, "zero_mib": sum(one["zero"] for one in last) * PAGE / MIB}


def say(what: str) -> None:
    if sys.stderr.isatty():
        print(what, file=sys.stderr)


def loss() -> list:
    found = []
    for name, data in COMBINATIONS.items():
        found.append({"guests have": name})
        for arrangement, groups in ARRANGEMENTS.items():
            with Lab(4) as lab:
                found[-1][arrangement] = saved_by(lab, groups, data)
            say(f"{name}, {arrangement}: {found[-1][arrangement]}")
    return found


def print_loss(found: list) -> None:
    print("MiB saved by equal pages, and beside that by pages of zeroes; and how much less that is in all than with all guests in one group")
    print(f"{'guests of two groups have':<26}" + "".join(f"{arrangement:>26}" for arrangement in ARRANGEMENTS))
    for one in found:
        line = f"{one['guests have']:<26}"
        whole = sum(one["one group"].values())
        for arrangement in ARRANGEMENTS:
            of = one[arrangement]
            line += f"{of['mib']:9.0f} ({of['zero_mib']:3.0f}) {100 * (1 - sum(of.values()) / whole):9.2f} %"
        print(line)


def across(pages: Path) -> int:
    """Frames that pages of both devices are in, by the tables of a lender that shares."""
    used = []
    for record in pages.glob("*.json"):
        of = json.loads(record.read_text())
        table = (pages / f"{of['id']}.{of['group']}.table").read_bytes()[: of["capacity"] // PAGE * 4]
        used.append(set(memoryview(table).cast("I")) - {0})
    return len(set.intersection(*used))


def stored_by(lab: Lab, groups: tuple, sealed: str) -> dict:
    """Two hosts with a VM each, most of whose memory is with one lender, and in the end all of it."""
    uri = f"nbd+unix:///{{}}?socket={lab.dir / 'lender'}"
    words = ["--dir", lab.ram / "pages", "--nbd", f"unix:{lab.dir / 'lender'}", "--name", "a", "--name", "b", "--share", "--report", "200ms"]
    lender = lab.popen([AQUIFER, "--json", "--run-dir", lab.run_dir, "export", "256M", *words], stdout=subprocess.PIPE)
    lender.stdout.readline()
    for group in sorted(set(groups)):
        lab.create_group(group, "--sealed", sealed)
    hosts = [(lab.dir / name, name, group) for name, group in zip("ab", groups)]
    for run_dir, name, group in hosts:
        run_dir.mkdir(exist_ok=True)
        lab.start(f"vm-{name}", group, ["--cache", "64M", "--lender", uri.format(name)], run_dir=run_dir)
    lab.until_full()
    time.sleep(1)
    for run_dir, name, _ in hosts:
        lab.aquifer("region", "persist", f"vm-{name}", run_dir=run_dir)
    # Those that were waiting to be read are from before.
    asked = time.monotonic()
    last: dict = {}
    while time.monotonic() - asked < 1 or not last:
        last = json.loads(lender.stdout.readline())
    common = across(lab.ram / "pages") * PAGE / MIB
    lab.end()
    return {"common_mib": common, "written_mib": last["stored"] / MIB, "kept_mib": (last["stored"] - last["saved"]) / MIB, "taken_mib": last["taken"] / MIB, "saved_pct": 100 * last["saved"] / last["stored"]}


def pool() -> dict:
    found = {}
    for name, groups, sealed in (("one group, deterministic", ("blue", "blue"), "deterministic"), ("one group, random", ("blue", "blue"), "random"),
                                 ("two groups, deterministic", ("blue", "red"), "deterministic")):
        with Lab(2) as lab:
            found[name] = stored_by(lab, groups, sealed)
        say(f"{name}: {found[name]}")
    return found


def print_pool(found: dict) -> None:
    for name, of in found.items():
        print(f"{name:<26} both hosts have {of['written_mib']:.0f} MiB there; kept {of['kept_mib']:.0f} MiB, in {of['taken_mib']:.0f} MiB of RAM: {of['saved_pct']:.1f} % saved; {of['common_mib']:.0f} MiB are both hosts' pages")


def draw_loss(found: list, file: str) -> None:
    """What is saved as one group, as two, and alone; zeroes count."""
    from picture import COLOURS, grouped, panels, save

    figure, [[panel]] = panels("What is not saved because groups are apart (Groups, Table 1)", 1, width=8)
    grouped(panel, [one["guests have"] for one in found],
            {arrangement: ([sum(one[arrangement].values()) for one in found], colour, None)
             for arrangement, colour in zip(ARRANGEMENTS, COLOURS)})
    panel.set(ylabel="MiB saved of four guests", xlabel="what guests of the two groups have beside kernel and root file system")
    panel.set_ylim(0, 520)
    panel.legend(loc="upper left", ncols=3)
    save(figure, file)


def draw_rates(found: dict, file: str) -> None:
    """The scanner's rate, second by second, and what the group saves, for each variant."""
    from picture import COLOURS, panels, save

    figure, axes = panels("The scanner's rate, by what its group does (Groups, Fig. 5 to 7)", len(found), width=4)
    for panel, (variant, phases) in zip(axes[0], found.items()):
        ones = [one for phase in phases.values() for one in phase]
        panel.plot([one["scan_pages_per_ms"] for one in ones], color=COLOURS[0], label="pages/ms")
        saved = panel.twinx()
        saved.plot([one["saved_bytes"] / MIB for one in ones], color=COLOURS[1], linestyle="--", label="MiB saved")
        saved.set_ylim(0, 420)
        panel.set_ylim(0, 65)
        begins = 0
        for phase, seconds in phases.items():
            panel.axvline(begins, color="#cccccc")
            panel.text(begins + 0.3, 64, phase.replace(", ", ",\n"), fontsize=7, va="top")
            begins += len(seconds)
        panel.set_title("always 20 pages/ms" if variant == "20" else f"Adaptive-{variant.upper()}")
        panel.set_xlabel("s")
    axes[0][0].set_ylabel("pages scanned a millisecond")
    saved.spines["right"].set_visible(True)
    saved.set_ylabel("MiB saved by equal pages (dashed)")
    save(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["ksm", "rates", "loss", "pool"])
    parser.add_argument("--seconds", type=int, default=12, help="of each phase of rates")
    parser.add_argument("--guests", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--picture", metavar="FILE.png", help="of rates and loss")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.what in ("loss", "pool"):
        found = loss() if args.what == "loss" else pool()
        if args.picture and args.what == "loss":
            draw_loss(found, args.picture)
        if args.json:
            print(json.dumps(found, indent=1))
        else:
            (print_loss if args.what == "loss" else print_pool)(found)
        return
    if args.what == "rates":
        with Lab(args.guests) as lab:
            found = lab.rates(args.seconds)
        if args.picture:
            draw_rates(found, args.picture)
        if args.json:
            print(json.dumps(found, indent=1))
            return
        for variant, phases in found.items():
            for phase, ones in phases.items():
                rates = [one["scan_pages_per_ms"] for one in ones]
                cpu_pct = statistics.mean(one["scanner_cpu_pct"] for one in ones)
                print(f"{variant:>4}, {phase:<22} {' '.join(f'{rate:>2}' for rate in rates)} pages/ms; {ones[-1]['saved_bytes'] / MIB:4.0f} MiB saved at its end; "
                      f"the scanner took {cpu_pct:.1f} % of a CPU")
        return
    rounds = []
    for _ in range(args.rounds):
        with Lab(args.guests) as lab:
            rounds.append({"ksm": lab.ksm(), "group": lab.group()})
        ksm, group = rounds[-1]["ksm"], rounds[-1]["group"]
        if not args.json:
            for name, one in rounds[-1].items():
                print(f"{name:>6}: {one['saved_mib']:.0f} of {one['of_mib']:.0f} MiB saved after {one['seconds']:.1f} s and {one['cpu_until_saved']:.2f} s of CPU; in all {one['scanned']} pages looked at "
                      f"with {one['cpu_seconds']:.2f} s of CPU: {one['scanned'] / max(one['cpu_seconds'], 0.01) / 1000:.0f} thousand a second", flush=True)
    ratio = lambda what: [what(one["group"]) / what(one["ksm"]) for one in rounds]
    saved = ratio(lambda one: one["saved_mib"])
    speed = ratio(lambda one: one["scanned"] / max(one["cpu_seconds"], 0.01))
    first = ratio(lambda one: max(one["cpu_until_saved"], 0.01))
    summary = {"rounds": rounds, "saved_ratio": statistics.median(saved), "scanned_per_cpu_second_ratio": statistics.median(speed),
               "cpu_until_saved_ratio": statistics.median(first)}
    if args.json:
        print(json.dumps(summary, indent=1))
    else:
        print(f"group beside KSM: {summary['saved_ratio']:.2f} of what it saves, {summary['scanned_per_cpu_second_ratio']:.2f} times the pages per CPU second, {summary['cpu_until_saved_ratio']:.2f} times the CPU until it is saved; "
              f"{rounds[-1]['group']['mappings_per_page']:.3f} mappings for each shared page, {rounds[-1]['group']['broken']} pages parted")


if __name__ == "__main__":
    main()
