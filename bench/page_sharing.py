#!/usr/bin/python3 -B
"""Measures how a group's scanner shares equal pages of its VMs, beside the kernel's KSM ([Kim14]).

Each emulated guest has 48 MiB of content that all have and 16 MiB of its own, beside its kernel and
root file system.

`ksm`: first QEMU's own memory with KSM at full speed (`pages_to_scan` 1000, `sleep_millisecs` 0),
which merges pages of all processes that opt in. Then the same guests as VMs of one group, with all
of their memory local, and `aquifer serve dedup` as fast as it can. Both run until the savings have
not grown by 1 % for 3 s. The savings are the decrease of what the guests take: for KSM their
proportional set size, for a group the blocks of regions and frames. CPU time is that of ksmd; or
that of the scanner, the engines, and the threads that map pages in QEMU. Targets: at least 90 % of
KSM's savings, and as many pages scanned per CPU second (aim: 3 times as many).

`rates`: how the scan rate follows the load (Figs. 5 to 7), by Adaptive-C, -CS and -CSD, and by 20
pages/ms all the time. The guests idle, then keep all processors busy, and then also have a cache
that is too small for what they read.

`loss`: what is not saved because groups are apart (Table 1). Four guests are one group, two groups
of two, or each a group of its own. They differ in the data of the first two and the last two.

`pool`: two hosts (run directories of their own) with a VM of one group each, and one lender for
both. It measures what both store there, and the RAM that this takes: with deterministic encryption,
with random encryption, and as two groups.

Build first:
    cargo build --release --workspace --lib --bins --examples

Usage: bench/page_sharing.py ksm|rates|loss|pool [--guests N] [--rounds N] [--seconds N]
    [--picture FILE.png] [--json]      (as root, on an otherwise idle machine)
"""

import json
import statistics
import subprocess
import time
from pathlib import Path

from common import bench
from common.bench import AQUIFER, MIB, PAGE, Failed, note
from common.grouping import LOCAL, GroupHost, until_settled

# The data of the guests of the first and of the second group, beside kernel and root file system.
COMBINATIONS = {
    "nothing, nothing": (0, 0), "data, nothing": (1, 0), "the same data": (1, 1),
    "other data": (1, 200000001),
}
ARRANGEMENTS = {"one group": "aaaa", "two groups": "aabb", "each alone": "abcd"}
# Groups of both hosts, and their encryption.
POOLS = {
    "one group, deterministic": (("blue", "blue"), "deterministic"),
    "one group, random": (("blue", "blue"), "random"),
    "two groups, deterministic": (("blue", "red"), "deterministic"),
}


def saved_by(host: GroupHost, groups: str, data: tuple) -> dict:
    """Returns what four guests in these groups save, zeros and the rest, once nothing is left."""
    for group in sorted(set(groups)):
        host.create_group(group)
    for guest, group in enumerate(groups):
        host.start(f"vm{guest}", group, LOCAL, f"data={data[guest // 2]}")
    host.wait_until_filled()
    time.sleep(2)
    scanners = [host.scan(100000, group, "200ms") for group in sorted(set(groups))]
    last: list = [{"saved_bytes": 0, "zero": 0} for _ in scanners]

    def saved() -> int:
        for at, scanner in enumerate(scanners):
            line = scanner.stdout.readline()
            if not line:
                raise Failed("a scanner has ended")
            last[at] = json.loads(line)
        return sum(one["saved_bytes"] + one["zero"] * PAGE for one in last)

    until_settled(saved, lambda: 0)
    host.end()
    return {
        "mib": sum(one["saved_bytes"] for one in last) / MIB,
        "zero_mib": sum(one["zero"] for one in last) * PAGE / MIB,
    }


def loss(_args) -> dict:
    found: dict = {}
    for name, data in COMBINATIONS.items():
        found[name] = {}
        for arrangement, groups in ARRANGEMENTS.items():
            with GroupHost(4) as host:
                found[name][arrangement] = saved_by(host, groups, data)
            note(f"{name}, {arrangement}: {found[name][arrangement]}")
    return found


def report_loss(found: dict) -> None:
    print("MiB saved by equal pages (by pages of zeros), and how much less than in one group")
    head = "".join(f"{arrangement:>26}" for arrangement in ARRANGEMENTS)
    print(f"{'guests of two groups have':<26}{head}")
    for name, one in found.items():
        line = f"{name:<26}"
        whole = sum(one["one group"].values())
        for of in one.values():
            less = 100 * (1 - sum(of.values()) / whole)
            line += f"{of['mib']:9.0f} ({of['zero_mib']:3.0f}) {less:9.2f} %"
        print(line)


def frames_of_both(pages: Path) -> int:
    """Returns the number of frames with pages of both devices, by the tables of the lender."""
    used = []
    for record in pages.glob("*.json"):
        of = json.loads(record.read_text())
        file = pages / f"{of['id']}.{of['group']}.table"
        table = file.read_bytes()[: of["capacity"] // PAGE * 4]
        used.append(set(memoryview(table).cast("I")) - {0})
    return len(set.intersection(*used))


def stored_by(host: GroupHost, groups: tuple, encryption: str) -> dict:
    """Runs two hosts with a VM each, whose memory is with one lender in the end."""
    socket = host.dir / "lender"
    lender = host.popen([
        AQUIFER, "--json", "--run-dir", host.run_dir, "serve", "export", "--size", "256M", "--dir",
        host.ram / "pages", "--nbd", f"unix:{socket}", "--name", "a", "--name", "b", "--share",
        "--report", "200ms",
    ], stdout=subprocess.PIPE)
    lender.stdout.readline()
    for group in sorted(set(groups)):
        host.create_group(group, "--encryption", encryption)
    places = [(host.dir / name, name, group) for name, group in zip("ab", groups)]
    for run_dir, name, group in places:
        run_dir.mkdir(exist_ok=True)
        where = ["--cache", "64M", "--lender", f"nbd+unix:///{name}?socket={socket}"]
        host.start(f"vm-{name}", group, where, run_dir=run_dir)
    host.wait_until_filled()
    time.sleep(1)
    for run_dir, name, _ in places:
        host.aquifer("region", "persist", f"vm-{name}", run_dir=run_dir)
    # The first reports in the pipe are older than the last page.
    asked = time.monotonic()
    last: dict = {}
    while time.monotonic() - asked < 1 or not last:
        last = json.loads(lender.stdout.readline())
    common = frames_of_both(host.ram / "pages") * PAGE / MIB
    host.end()
    return {
        "common_mib": common, "written_mib": last["stored"] / MIB,
        "kept_mib": (last["stored"] - last["saved"]) / MIB, "taken_mib": last["taken"] / MIB,
        "saved_pct": 100 * last["saved"] / last["stored"],
    }


def pool(_args) -> dict:
    found = {}
    for name, (groups, encryption) in POOLS.items():
        with GroupHost(2) as host:
            found[name] = stored_by(host, groups, encryption)
        note(f"{name}: {found[name]}")
    return found


def report_pool(found: dict) -> None:
    for name, of in found.items():
        print(
            f"{name:<26} both hosts store {of['written_mib']:.0f} MiB; the lender keeps "
            f"{of['kept_mib']:.0f} MiB, in {of['taken_mib']:.0f} MiB of RAM: "
            f"{of['saved_pct']:.1f} % saved; {of['common_mib']:.0f} MiB are pages of both hosts"
        )


def draw_loss(found: dict, file: str) -> None:
    """Draws the savings as one group, as two, and alone; zeros count."""
    from common import picture

    title = "Savings lost because groups are apart ([Kim14] Table 1)"
    figure, [[panel]] = picture.panels(title, 1, width=8)
    bars = {
        arrangement: ([sum(one[arrangement].values()) for one in found.values()], colour, None)
        for arrangement, colour in zip(ARRANGEMENTS, picture.COLOURS)
    }
    picture.grouped(panel, list(found), bars)
    panel.set(
        ylabel="MiB saved of four guests",
        xlabel="data of the two groups' guests, beside kernel and root file system",
    )
    panel.set_ylim(0, 520)
    panel.legend(loc="upper left", ncols=3)
    picture.save(figure, file)


def rates(args) -> dict:
    with GroupHost(args.guests) as host:
        return host.rates(args.seconds)


def report_rates(found: dict) -> None:
    for variant, phases in found.items():
        for phase, reports in phases.items():
            scanned = " ".join(f"{one['scan_pages_per_ms']:>2}" for one in reports)
            cpu_pct = statistics.mean(one["scanner_cpu_pct"] for one in reports)
            print(
                f"{variant:>4}, {phase:<22} {scanned} pages/ms; "
                f"{reports[-1]['saved_bytes'] / MIB:4.0f} MiB saved at its end; "
                f"the scanner used {cpu_pct:.1f} % of a CPU"
            )


def draw_rates(found: dict, file: str) -> None:
    """Draws the scan rate, second by second, and the group's savings, for each variant."""
    from common import picture

    title = "The scan rate by the load of the group ([Kim14] Figs. 5 to 7)"
    figure, axes = picture.panels(title, len(found), width=4)
    rate_colour, saved_colour = picture.COLOURS[:2]
    for panel, (variant, phases) in zip(axes[0], found.items()):
        reports = [one for phase in phases.values() for one in phase]
        panel.plot(
            [one["scan_pages_per_ms"] for one in reports], color=rate_colour, label="pages/ms"
        )
        saved = panel.twinx()
        saved.plot(
            [one["saved_bytes"] / MIB for one in reports], color=saved_colour, linestyle="--",
            label="MiB saved",
        )
        saved.set_ylim(0, 420)
        panel.set_ylim(0, 65)
        begins = 0
        for phase, seconds in phases.items():
            panel.axvline(begins, color="#cccccc")
            panel.text(begins + 0.3, 64, phase.replace(", ", ",\n"), fontsize=7, va="top")
            begins += len(seconds)
        always = variant == "20"
        panel.set_title("always 20 pages/ms" if always else f"Adaptive-{variant.upper()}")
        panel.set_xlabel("s")
    axes[0][0].set_ylabel("pages scanned a millisecond")
    saved.spines["right"].set_visible(True)
    saved.set_ylabel("MiB saved by equal pages (dashed)")
    picture.save(figure, file)


def ksm(args) -> dict:
    with GroupHost(args.guests) as host:
        result = {"ksm": host.ksm(), "group": host.group()}
    kernel, group = result["ksm"], result["group"]
    speed = lambda one: one["scanned"] / max(one["cpu_seconds"], 0.01)
    first = lambda one: max(one["cpu_until_saved"], 0.01)
    result["ratios"] = {
        "saved": group["saved_mib"] / kernel["saved_mib"],
        "scanned_per_cpu_second": speed(group) / speed(kernel),
        "cpu_until_saved": first(group) / first(kernel),
    }
    return result


def report_ksm(found: dict) -> None:
    for name in ("ksm", "group"):
        one = found[name]
        speed = one["scanned"] / max(one["cpu_seconds"], 0.01) / 1000
        print(
            f"{name:>6}: {one['saved_mib']:.0f} of {one['of_mib']:.0f} MiB saved after "
            f"{one['seconds']:.1f} s and {one['cpu_until_saved']:.2f} s of CPU; in total "
            f"{one['scanned']} pages scanned with {one['cpu_seconds']:.2f} s of CPU: "
            f"{speed:.0f} thousand a second"
        )
    ratios, group = found["ratios"], found["group"]
    print(
        f"group beside KSM: {ratios['saved']:.2f} of its savings (target: at least 0.9), "
        f"{ratios['scanned_per_cpu_second']:.2f} times the pages per CPU second (target: at least "
        f"1, aim: 3), {ratios['cpu_until_saved']:.2f} times the CPU until all is saved; "
        f"{group['mappings_per_page']:.3f} mappings a shared page, {group['broken']} pages unshared"
    )


# Part: what measures it, reports it and draws it.
PARTS = {
    "ksm": (ksm, report_ksm, None),
    "rates": (rates, report_rates, draw_rates),
    "loss": (loss, report_loss, draw_loss),
    "pool": (pool, report_pool, None),
}


def main() -> None:
    parser = bench.arguments(__doc__, rounds=1, picture=True)
    parser.add_argument("part", choices=PARTS, help="only rates and loss draw a picture")
    parser.add_argument("--seconds", type=int, default=12, help="of each phase of rates")
    parser.add_argument("--guests", type=int, default=4, help="of ksm and rates")
    args = bench.parse(parser)
    measure, report_one, draw = PARTS[args.part]
    rounds = [measure(args) for _ in range(args.rounds)]
    if args.picture and draw:
        draw(rounds[-1], args.picture)

    def report(result: dict) -> None:
        for one in result["rounds"]:
            report_one(one)

    bench.finish({"rounds": rounds}, report)


if __name__ == "__main__":
    bench.start(main)
