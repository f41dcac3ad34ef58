#!/usr/bin/python3 -B
"""Measures what a group's VMs gain from the memory that sharing saves ([Kim14] sections 6.2.2-7.2).

All guests are emulated. Every guest has 48 MiB of content that all have, beside kernel and root
file system, and a swap disk of 300 requests a second. It has at least 176 MiB, and at most 336. A
group has a scanner (Adaptive-CSD), and `aquifer serve reprovision` runs. A working guest checks and
rewrites 130 to 260 MiB of its own, pages at random, at up to 2,500 pages a second. Work is the
number of pages a second, over `--seconds`.

`policies` (Fig. 8): two of four guests work; the others have little to do. The surplus goes to no
VM, or all of it by fair, entitlement, or demand.

`hog` (Figs. 11 and 12): a group with one working guest, beside another group whose guests use more
memory than they have: alone, in groups of their own (GRP), and all in one group (NOGRP). Target: in
GRP, the group is at most 5 % slower than alone.

`lend` (Fig. 14): a group idles while another works, and then works too: in groups of their own
(GRP), with both agreeing to lend (GRP-M), and all in one group (NOGRP).

`cache` (Table 2): a guest reads a disk of 256 MiB at random, four of five times in a third of it.
The disk serves 600 reads a second. Three other guests idle. The surplus goes to no VM, to all by
fair, entitlement and demand, and by demand with the group's disk cache. Target: with the cache, at
least 1.32 times the reads.

`swap` (Fig. 17): a guest alone on its host works on more memory than it has. It swaps to a disk of
300 reads and 300 writes a second, through its group's disk cache, which has no memory of its own.
The cache borrows nothing, or the surplus of two other guests of the group on another host. That
host is also on this machine, with its own run directory and services, and uses mutual TLS.

Build first:
    cargo build --release --workspace --lib --bins --examples; scripts/guest-agent

Usage: bench/group_surplus.py policies|hog|lend|cache|swap [--seconds N] [--rounds N]
    [--picture FILE.png] [--json]      (as root, on an otherwise idle machine)
"""

import json
import os
import random
import tempfile
import time
from pathlib import Path

from common import bench
from common.bench import BLKIO_CGROUPS, EXAMPLES, MIB, Failed, wait
from common.resizing import NO_INIT, Host

BASE, MOST = 176, 336
SWAP = 512 * MIB
DISK = 256 * MIB
# An agreement by which the surplus goes to no VM.
NONE = ["--policy", "demand", "--cache-reserve", "1T"]
POLICIES = {"none": NONE} | {
    name: ["--policy", name] for name in ("fair", "entitlement", "demand")
}


class Place:
    """A host with groups of guests, all of which end with the block."""

    def __init__(self):
        same = Path(tempfile.mkstemp(prefix="aquifer-same-")[1])
        same.write_bytes(random.Random(1).randbytes(48 * MIB))
        try:
            self.host = Host({EXAMPLES / "worker": "/bin/worker", same: "/same"})
        finally:
            same.unlink()
        os.environ["AQUIFER_GROUPS"] = str(self.host.dir / "groups")
        self.guests: dict = {}
        self.groups: dict = {}

    def __enter__(self) -> "Place":
        self.host.__enter__()
        return self

    def __exit__(self, *_) -> None:
        # Scanners and balancers use the regions, so they end before the VMs.
        for process in self.host.processes:
            process.terminate()
            process.wait()
        self.host.__exit__()

    def group(self, name: str, guests: list, *terms) -> None:
        self.host.aquifer("group", "create", name, *terms)
        self.join(name, guests)

    def join(
        self, name: str, guests: list, words: dict | None = None, cached: bool = False
    ) -> None:
        self.groups[name] = guests
        for guest in guests:
            disk = self.host.dir / f"{guest}.swap"
            with disk.open("wb") as file:
                file.truncate(SWAP)
            memory = ["--min", f"{BASE}M", "--cache", f"{MOST + 64}M", "--emulate-link", "1us"]
            more = (words or {}).get(guest, [])
            drive = f"if=virtio,format=raw,file={disk},throttling.iops-total=300"
            swap = ["--cached-disk", disk] if cached else ["--", "-drive", drive]
            self.guests[guest] = self.host.guest(
                guest, f"{MOST}M", f"{MOST}M", *memory, "--group", name, *more, *swap,
                kernel=NO_INIT, cpus=1,
            )

    def settle(self, least: float) -> None:
        """Starts the scanners and the balancer. Returns once each group saves `least` MiB and the
        VMs have shrunk to their targets."""
        swapon = "mkswap /dev/${disk##*/} > /dev/null && swapon /dev/${disk##*/}"
        for guest in self.guests.values():
            guest(
                "for disk in /sys/block/vd*; do "
                f"[ $(cat $disk/size) = {SWAP // 512} ] && {swapon}; done; "
                "echo 3 > /proc/sys/vm/drop_caches"
            )
        for name in self.groups:
            log = (self.host.dir / f"{name}.scan").open("w")
            self.host.start_aquifer("serve", "dedup", name, "--report", "1s", output=log)
        self.log = self.host.dir / "balance"
        self.host.start_aquifer("serve", "reprovision", output=self.log.open("w"))
        saves = lambda name: self.now()[name]["saved_bytes"] / MIB >= least
        for name, guests in self.groups.items():
            if len(guests) > 1:
                wait(f"group {name} to save {least:.0f} MiB", lambda: saves(name), 180, 0.5)
        wait("the VMs to shrink to their targets", self.have_shrunk, 60, 0.5)

    def have_shrunk(self) -> bool:
        vms = [vm for group in self.now().values() for vm in group["vms"]]
        return all(vm["size"] <= vm["target"] + 12 * MIB for vm in vms)

    def periods(self) -> list:
        """Returns the reports of the balancer, one a period."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.endswith("}")]

    def now(self) -> dict:
        """Returns the groups in the last period."""
        periods = self.periods()
        if not periods:
            return {name: {"saved_bytes": 0, "vms": []} for name in self.groups}
        return {group["account"]["group"]: group for group in periods[-1]["groups"]}

    def work(self, name: str, load: str) -> None:
        self.guests[name](f"worker {load} > /run/work & true")

    def progress(self, name: str) -> tuple:
        """Returns the guest's pages so far, and the number of wrong ones."""
        last = self.guests[name]("tail -n 2 /run/work | head -n 1")
        words = last[0].split() if last else []
        return (int(words[2]), int(words[3])) if len(words) == 4 else (0, 0)

    def begin(self, work: dict) -> None:
        for guest, load in work.items():
            self.work(guest, load)
        for guest in work:
            wait(f"{guest} to work", lambda: self.progress(guest)[0] > 0, 180, 0.5)

    def measure(self, guests: list, seconds: float) -> dict:
        """Returns the pages a second of each guest."""
        before = {guest: self.progress(guest)[0] for guest in guests}
        began = time.monotonic()
        time.sleep(seconds)
        found = {}
        for guest in guests:
            pages, wrong = self.progress(guest)
            if wrong:
                raise Failed(f"{guest}: {wrong} pages are wrong")
            found[guest] = (pages - before[guest]) / (time.monotonic() - began)
        return found

    def given(self) -> dict:
        """Returns the MiB of the surplus that each VM has."""
        vms = [vm for group in self.now().values() for vm in group["vms"]]
        return {vm["vm"]: (vm["size"] - vm["base"]) / MIB for vm in vms}

    def saved(self, group: str) -> float:
        return self.now()[group]["saved_bytes"] / MIB

    def history(self) -> list:
        """Returns, second by second, the MiB that each VM had and that its group saved."""
        def keep(group: dict) -> dict:
            vms = {vm["vm"]: vm["size"] / MIB for vm in group["vms"]}
            return {"saved": group["saved_bytes"] / MIB, "vms": vms}

        return [
            {group["account"]["group"]: keep(group) for group in period["groups"]}
            for period in self.periods()
        ]

    def cache_status(self) -> dict | None:
        return self.host.aquifer("group", "show", "blue")["cache"]

    def start_cache(self, *words) -> None:
        """Starts the disk cache of group blue. It runs before the VMs with a disk there."""
        self.host.start_aquifer("serve", "disk-cache", "blue", *words)
        wait("the disk cache", lambda: self.cache_status() is not None)

    def check_errors(self) -> None:
        for name, guest in self.guests.items():
            if said := guest.errors():
                raise Failed(f"{name}: errors of its kernel: {said}")


def memory(seed: int, mib: int = 150, rate: int = 2500) -> str:
    return f"memory {mib} {rate} {seed}"


def compare(found: dict, key: str, setting: str, name: str) -> None:
    """Adds to each setting the ratio of a figure to that of one setting."""
    base = found[setting][key]
    for one in found.values():
        one[name] = one[key] / base


def policies(seconds: int) -> dict:
    found: dict = {}
    for policy, terms in POLICIES.items():
        with Place() as place:
            place.group("blue", ["one", "two", "three", "four"], *terms)
            place.settle(100)
            place.begin({
                "one": memory(1, 260), "two": memory(2, 260), "three": memory(3, 8, 500),
                "four": memory(4, 8, 500),
            })
            work = place.measure(["one", "two"], seconds)
            found[policy] = {
                "pages_per_s": sum(work.values()), "given_mib": place.given(),
                "saved_mib": place.saved("blue"), "history": place.history(),
            }
            place.check_errors()
    compare(found, "pages_per_s", "none", "beside_none")
    return found


def hog(seconds: int) -> dict:
    found: dict = {}
    for setting in ("alone", "GRP", "NOGRP"):
        with Place() as place:
            if setting == "NOGRP":
                place.group("all", ["one", "two", "hog1", "hog2"])
            else:
                place.group("blue", ["one", "two"])
                if setting == "GRP":
                    place.group("hogs", ["hog1", "hog2"])
            place.settle(60)
            if setting != "alone":
                place.begin({"hog1": memory(3, 300, 600), "hog2": memory(4, 300, 600)})
                time.sleep(10)
            place.begin({"one": memory(1, 130, 1500)})
            found[setting] = {
                "pages_per_s": place.measure(["one"], seconds)["one"],
                "given_mib": place.given(), "history": place.history(),
            }
            place.check_errors()
    compare(found, "pages_per_s", "alone", "beside_alone")
    return found


def lend(seconds: int) -> dict:
    found: dict = {}
    for setting in ("GRP", "GRP-M", "NOGRP"):
        with Place() as place:
            terms = ["--allow-lending", "yes"] if setting == "GRP-M" else []
            if setting == "NOGRP":
                place.group("all", ["one", "two", "three", "four"])
            else:
                place.group("idle", ["one", "two"], *terms)
                place.group("busy", ["three", "four"], *terms)
            place.settle(60)
            place.begin({"three": memory(3, 170, 1500), "four": memory(4, 170, 1500)})
            first = place.measure(["three", "four"], seconds)
            place.begin({"one": memory(1, 130, 1500)})
            then = place.measure(["one", "three", "four"], seconds)
            found[setting] = {
                "busy_pages_per_s": sum(first.values()), "then_idle_pages_per_s": then["one"],
                "then_busy_pages_per_s": then["three"] + then["four"],
                "given_mib": place.given(), "history": place.history(),
            }
            place.check_errors()
    for key in ("busy", "then_idle", "then_busy"):
        compare(found, f"{key}_pages_per_s", "GRP", f"{key}_beside_GRP")
    return found


def cache(seconds: int) -> dict:
    found: dict = {}
    for setting, terms in (POLICIES | {"demand, cache": ["--policy", "demand"]}).items():
        with Place() as place, Throttled(place.host.dir, 600) as cgroup:
            disk = place.host.dir / "disk"
            chance = random.Random(2)
            with disk.open("wb") as file:
                for _ in range(DISK // MIB):
                    file.write(chance.randbytes(MIB))
            os.sync()
            place.host.aquifer("group", "create", "blue", *terms)
            size = [] if setting.endswith("cache") else ["--size", "0"]
            place.start_cache("--cgroup", cgroup, *size)
            words = {"one": ["--cached-disk", disk]}
            place.join("blue", ["one", "two", "three", "four"], words)
            place.settle(100)
            data = place.guests["one"](
                f"for disk in /sys/block/vd*; do [ $(cat $disk/size) = {DISK // 512} ] && "
                "echo /dev/${disk##*/}; done; true"
            )[-1]
            place.begin({"one": f"reads {data} {DISK // MIB} 20000 1"})
            reads = place.measure(["one"], seconds)["one"]
            shown = place.cache_status()
            found[setting] = {
                "reads_per_s": reads, "kb_per_s": reads * 4.096, "given_mib": place.given(),
                "cache_mib": shown["used"] / MIB, "hits": shown["hits"],
                "misses": shown["misses"],
            }
            place.check_errors()
    compare(found, "reads_per_s", "none", "beside_none")
    return found


def swap(seconds: int) -> dict:
    found: dict = {}
    for setting in ("disk", "remote"):
        with Place() as there:
            tls = there.host.dir / "tls"
            hosts = [
                word for host, address in (("there", "127.0.0.1"), ("here", "127.0.0.2"))
                for word in ("--host", host, "--address", address)
            ]
            there.host.aquifer("cluster", "init", "--dir", tls, *hosts)
            there.host.aquifer("group", "create", "blue")
            there.start_cache("--lend", "127.0.0.1:0", "--tls", tls / "there/tls")
            port = there.cache_status()["lends"][0].rsplit(":", 1)[1]
            there.join("blue", ["two", "three"])
            there.settle(60)
            has_memory = lambda: there.cache_status()["size"] > 64 * MIB
            wait("memory of the lender's cache", has_memory, 60, 0.5)
            agreement = (there.host.dir / "groups/blue.toml").read_text()
            with Place() as here, Throttled(here.host.dir, 300, 300) as cgroup:
                (here.host.dir / "groups").mkdir()
                (here.host.dir / "groups/blue.toml").write_text(agreement)
                lender = ["--lender", f"nbds://127.0.0.1:{port}/", "--lender-host", "there"]
                borrows = [*lender, "--tls", tls / "here/tls"] if setting == "remote" else []
                here.start_cache("--cgroup", cgroup, "--size", "0", *borrows)
                here.join("blue", ["one"], cached=True)
                here.settle(0)
                here.begin({"one": memory(1, 200, 100000)})
                pages = here.measure(["one"], seconds)["one"]
                shown = here.cache_status()
                found[setting] = {
                    "pages_per_s": pages, "cache_read_mib": shown["read_bytes"] / MIB,
                    "cache_written_mib": shown["written_bytes"] / MIB,
                    "lender_size_mib": there.cache_status()["size"] / MIB,
                }
                for lender in shown["lenders"]:
                    found[setting] |= {
                        f"{key}_mib": lender[f"{key}_bytes"] / MIB
                        for key in ("sent", "read", "dropped", "wrong")
                    }
                here.check_errors()
            there.check_errors()
    compare(found, "pages_per_s", "disk", "beside_disk")
    return found


class Throttled:
    """A blkio cgroup that limits the reads, and perhaps the writes, a second of a directory's disk.
    """

    def __init__(self, directory: Path, reads: int, writes: int | None = None):
        number = os.stat(directory).st_dev
        most = {"read": reads} | ({"write": writes} if writes else {})
        device = f"{os.major(number)}:{os.minor(number)}"
        self.rules = {way: f"{device} {rate}" for way, rate in most.items()}
        self.path = BLKIO_CGROUPS / f"aquifer-bench-{os.getpid()}"

    def __enter__(self) -> Path:
        self.path.mkdir()
        try:
            for way, rule in self.rules.items():
                (self.path / f"blkio.throttle.{way}_iops_device").write_text(rule)
        except OSError as error:
            self.path.rmdir()
            raise Failed(f"cannot limit a disk to {self.rules}: {error}") from error
        return self.path

    def __exit__(self, *_) -> None:
        for process in (self.path / "cgroup.procs").read_text().split():
            (BLKIO_CGROUPS / "cgroup.procs").write_text(process)
        self.path.rmdir()


# Part: what measures it, the picture's title, and the figures in the picture.
PARTS = {
    "policies": (
        policies, "Two of four guests work ([Kim14] Figs. 8 and 10)",
        {"work of both": "pages_per_s"},
    ),
    "hog": (
        hog, "A group beside one that uses all it can get ([Kim14] Figs. 11 and 12)",
        {"work of the group": "pages_per_s"},
    ),
    "lend": (
        lend, "A group idles, then works, beside one that works ([Kim14] Figs. 14 and 15)",
        {
            "the busy group, while the other idles": "busy_pages_per_s",
            "the idle group, when it works": "then_idle_pages_per_s",
            "the busy group, then": "then_busy_pages_per_s",
        },
    ),
    "cache": (cache, "Random reads of a disk ([Kim14] Table 2)", {"reads": "reads_per_s"}),
    "swap": (
        swap, "A guest swaps to its disk, and to another host ([Kim14] Fig. 17)",
        {"work": "pages_per_s"},
    ),
}


def draw_history(panel, setting: str, history: list, top: float) -> None:
    """Draws what VMs had and groups saved, second by second."""
    from common import picture

    nothing: dict = {"vms": {}, "saved": float("nan")}
    names = sorted(
        {(name, vm) for period in history for name, group in period.items() for vm in group["vms"]}
    )
    for at, (name, vm) in enumerate(names):
        sizes = [
            period.get(name, nothing)["vms"].get(vm, float("nan")) for period in history
        ]
        panel.plot(sizes, label=f"{vm} has", color=picture.COLOURS[at])
    for at, name in enumerate(sorted({name for name, _ in names})):
        saved = [period.get(name, nothing)["saved"] for period in history]
        style = ["--", ":"][at % 2]
        panel.plot(saved, label=f"group {name} saves", color="#333333", linestyle=style)
    panel.set_title(setting)
    panel.set_ylim(0, top * 1.05)
    panel.set_xlabel("s")
    panel.set_ylabel("MiB")
    panel.legend(fontsize=7, loc="lower right")


def draw(part: str, found: dict, file: str) -> None:
    """Draws the work as bars, and what VMs had meanwhile."""
    from common import picture

    _, title, figures = PARTS[part]
    histories = {name: one["history"] for name, one in found.items() if "history" in one}
    columns, width = 1 + len(histories), 4.2 if histories else 6.4
    figure, axes = picture.panels(title, columns, width=width)
    first = axes[0][0]
    bars = {
        label: ([one[key] for one in found.values()], picture.COLOURS[at], None)
        for at, (label, key) in enumerate(figures.items())
    }
    picture.grouped(first, list(found), bars)
    first.set_title("pages a second")
    first.tick_params(axis="x", labelsize=8)
    if len(figures) > 1:
        first.legend(fontsize=7)
    groups = [group for of in histories.values() for period in of for group in period.values()]
    sizes = [size for group in groups for size in (group["saved"], *group["vms"].values())]
    for panel, (setting, history) in zip(axes[0][1:], histories.items()):
        draw_history(panel, setting, history, max(sizes, default=0))
    picture.save(figure, file)


def report(result: dict) -> None:
    for found in result["rounds"]:
        for setting, one in found.items():
            texts = []
            for key, value in one.items():
                if key != "history":
                    is_number = not isinstance(value, dict)
                    texts.append(f"{key} {f'{value:.2f}' if is_number else json.dumps(value)}")
            print(f"{setting:>12}: {'; '.join(texts)}")


def main() -> None:
    parser = bench.arguments(__doc__, rounds=1, picture=True)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--seconds", type=int, default=40, help="for which work is counted")
    args = bench.parse(parser)
    measure = PARTS[args.part][0]
    rounds = [measure(args.seconds) for _ in range(args.rounds)]
    if args.picture:
        draw(args.part, rounds[-1], args.picture)
    bench.finish({"rounds": rounds}, report)


if __name__ == "__main__":
    bench.start(main)
