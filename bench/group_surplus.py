#!/usr/bin/python3 -B
"""What a group of VMs gets of what it saves by sharing (Groups, sections 6.2.2 to 7.2), with emulated guests.

Every guest has 48 MiB of content that all have, beside their kernel and root file system, and a swap disk that makes 300 requests a second. It is sure of 176 MiB and
can have 336. A group has a scanner (Adaptive-CSD), and `aquifer group balance` runs. Who works has 130 to 260 MiB of its own that it checks and rewrites, pages by chance, at up to 2,500
pages a second: work is the number of pages in `--seconds`.

`policies`: Figure 8. Two of four guests work; the others have a little to do. Nobody gets anything, or all by fair, entitlement, demand.
`hog`: Figures 11 and 12. A group with a guest that works, beside another group whose guests use memory that they do not have: alone, in groups of their own (GRP), and all in one
group (NOGRP). Wanted: the group is no slower than alone by more than 5 % in GRP.
`lend`: Figure 14. A group does nothing while another one works; then that works, too: in groups of their own (GRP), where both agree to lend (GRP-M), and all in one group (NOGRP).
`cache`: Table 2. A guest reads at random, four of five times in a third of it, from a disk of 256 MiB that makes 600 reads a second; three others do nothing. Nobody gets anything; all by fair,
entitlement, demand; and by demand, with the group's secondary cache.
`swap`: Figure 17. A guest alone on its host works on more than it has, and swaps to a disk that makes 300 reads and 300 writes a second, through its group's cache, which has no memory; that borrows
nothing, or what two other guests of the group save and do not need on another host, which is on this machine, too (its own run directory and services; mutual TLS).

Build first: cargo build --release --workspace --lib --bins --examples; scripts/guest-agent

Usage: lab/surplus policies|hog|lend|cache|swap [--seconds N] [--rounds N] [--picture FILE] [--json]       (as root, on a machine that does nothing else)
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from resizing import AQUIFER, BUILT, NO_INIT, Failed, Host, wait

MIB = 1 << 20
BASE, MOST = 176, 336
SWAP = 512 * MIB
DISK = 256 * MIB
NOBODY = ["--policy", "demand", "--keep", "1T"]


class Place:
    """A host with groups of guests. All ends with it."""

    def __init__(self):
        same = Path(tempfile.mkstemp(prefix="aquifer-same-")[1])
        same.write_bytes(random.Random(1).randbytes(48 * MIB))
        try:
            self.host = Host({BUILT / "examples/worker": "/bin/worker", same: "/same"})
        finally:
            same.unlink()
        os.environ["AQUIFER_GROUPS"] = str(self.host.dir / "groups")
        self.guests: dict = {}
        self.groups: dict = {}

    def __enter__(self):
        self.host.__enter__()
        return self

    def __exit__(self, *_):
        # They look at regions, which go with the VMs.
        for process in self.host.processes:
            process.terminate()
            process.wait()
        self.host.__exit__()

    def group(self, name: str, guests: list, *terms) -> None:
        self.host.aquifer("group", "create", name, *terms)
        self.join(name, guests)

    def join(self, name: str, guests: list, words: dict = {}, cached: bool = False) -> None:
        self.groups[name] = guests
        for guest in guests:
            disk = self.host.dir / f"{guest}.swap"
            with disk.open("wb") as file:
                file.truncate(SWAP)
            memory = ["--min", f"{BASE}M", "--cache", f"{MOST + 64}M", "--emulate-link", "1us", "--group", name, *words.get(guest, [])]
            disk_words = ["--cached-disk", disk] if cached else ["--", "-drive", f"if=virtio,format=raw,file={disk},throttling.iops-total=300"]
            self.guests[guest] = self.host.guest(guest, f"{MOST}M", f"{MOST}M", *memory, *disk_words, kernel=NO_INIT, cpus=1)

    def settle(self, least: float) -> None:
        """Scanners and the balancer begin; returns when so many MiB are saved in each group, and VMs have what they are sure of."""
        for guest in self.guests.values():
            guest(f"for disk in /sys/block/vd*; do [ $(cat $disk/size) = {SWAP // 512} ] && mkswap /dev/${{disk##*/}} > /dev/null && swapon /dev/${{disk##*/}}; done; "
                  "echo 3 > /proc/sys/vm/drop_caches")
        for name in self.groups:
            out = (self.host.dir / f"{name}.scan").open("w")
            self.host.start([AQUIFER, "--json", "--run-dir", self.host.run_dir, "group", "scan", name, "--report", "1s"], out)
        self.said = self.host.dir / "balance"
        self.host.start([AQUIFER, "--json", "--run-dir", self.host.run_dir, "group", "balance"], self.said.open("w"))
        for name, guests in self.groups.items():
            if len(guests) > 1:
                wait(f"group {name} to save {least:.0f} MiB", lambda name=name: self.now()[name]["saved_bytes"] / MIB >= least, 180, 0.5)
        wait("VMs to have what they are sure of", lambda: all(vm["size"] <= vm["target"] + 12 * MIB for group in self.now().values() for vm in group["vms"]), 60, 0.5)

    def turns(self) -> list:
        return [json.loads(line) for line in self.said.read_text().splitlines() if line.endswith("}")]

    def now(self) -> dict:
        turns = self.turns()
        return {group["account"]["group"]: group for group in turns[-1]["groups"]} if turns else {name: {"saved_bytes": 0, "vms": []} for name in self.groups}

    def work(self, name: str, what: str) -> None:
        self.guests[name](f"worker {what} > /run/work & true")

    def works(self, name: str) -> tuple:
        """Pages so far, and how many were wrong."""
        last = self.guests[name]("tail -n 2 /run/work | head -n 1")
        words = last[0].split() if last else []
        return (int(words[2]), int(words[3])) if len(words) == 4 else (0, 0)

    def begin(self, work: dict) -> None:
        for guest, what in work.items():
            self.work(guest, what)
        for guest in work:
            wait(f"{guest} to work", lambda guest=guest: self.works(guest)[0] > 0, 180, 0.5)

    def measure(self, guests: list, seconds: float) -> dict:
        before = {guest: self.works(guest)[0] for guest in guests}
        began = time.monotonic()
        time.sleep(seconds)
        found = {}
        for guest in guests:
            pages, wrong = self.works(guest)
            if wrong:
                raise Failed(f"{guest}: {wrong} pages were not what they must be")
            found[guest] = (pages - before[guest]) / (time.monotonic() - began)
        return found

    def given(self) -> dict:
        return {vm["vm"]: (vm["size"] - vm["base"]) / MIB for group in self.now().values() for vm in group["vms"]}

    def history(self) -> list:
        """What each VM had, second by second, and what its group saved."""
        keep = lambda group: {"saved": group["saved_bytes"] / MIB, "vms": {vm["vm"]: vm["size"] / MIB for vm in group["vms"]}}
        return [{group["account"]["group"]: keep(group) for group in turn["groups"]} for turn in self.turns()]

    def errors(self) -> None:
        for name, guest in self.guests.items():
            if said := guest.errors():
                raise Failed(f"{name}: its kernel says {said}")


def memory(seed: int, mib: int = 150, rate: int = 2500) -> str:
    return f"memory {mib} {rate} {seed}"


def policies(seconds: int) -> dict:
    found = {}
    for policy, terms in {"nobody": NOBODY, **{name: ["--policy", name] for name in ("fair", "entitlement", "demand")}}.items():
        with Place() as place:
            place.group("blue", ["one", "two", "three", "four"], *terms)
            place.settle(100)
            place.begin({"one": memory(1, 260), "two": memory(2, 260), "three": memory(3, 8, 500), "four": memory(4, 8, 500)})
            work = place.measure(["one", "two"], seconds)
            found[policy] = {"pages_per_s": work, "given_mib": place.given(), "saved_mib": place.now()["blue"]["saved_bytes"] / MIB, "history": place.history()}
            place.errors()
    base = sum(found["nobody"]["pages_per_s"].values())
    for one in found.values():
        one["beside_nobody"] = sum(one["pages_per_s"].values()) / base
    return found


def hog(seconds: int) -> dict:
    found = {}
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
            found[setting] = {"pages_per_s": place.measure(["one"], seconds)["one"], "given_mib": place.given(), "history": place.history()}
            place.errors()
    for one in found.values():
        one["beside_alone"] = one["pages_per_s"] / found["alone"]["pages_per_s"]
    return found


def lend(seconds: int) -> dict:
    found = {}
    for setting in ("GRP", "GRP-M", "NOGRP"):
        with Place() as place:
            terms = ["--lends", "yes"] if setting == "GRP-M" else []
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
            found[setting] = {"busy_pages_per_s": sum(first.values()), "then_idle_pages_per_s": then["one"], "then_busy_pages_per_s": then["three"] + then["four"],
                              "given_mib": place.given(), "history": place.history()}
            place.errors()
    for key in ("busy_pages_per_s", "then_idle_pages_per_s", "then_busy_pages_per_s"):
        for one in found.values():
            one[key.replace("pages_per_s", "beside_GRP")] = one[key] / found["GRP"][key]
    return found


def cache(seconds: int) -> dict:
    found = {}
    settings = {"nobody": NOBODY, **{name: ["--policy", name] for name in ("fair", "entitlement", "demand")}, "demand, cache": ["--policy", "demand"]}
    for setting, terms in settings.items():
        with Place() as place, Throttled(place.host.dir, 600) as cgroup:
            disk = place.host.dir / "disk"
            chance = random.Random(2)
            with disk.open("wb") as file:
                for _ in range(DISK // MIB):
                    file.write(chance.randbytes(MIB))
            os.sync()
            # It runs before the VM does that has a disk there.
            place.host.aquifer("group", "create", "blue", *terms)
            size = [] if setting.endswith("cache") else ["--size", "0"]
            place.host.start([AQUIFER, "--run-dir", place.host.run_dir, "group", "cache", "blue", "--cgroup", cgroup, *size])
            wait("the cache", lambda: place.host.aquifer("group", "show", "blue")["cache"] is not None)
            place.join("blue", ["one", "two", "three", "four"], {"one": ["--cached-disk", disk]})
            place.settle(100)
            data = place.guests["one"](f"for disk in /sys/block/vd*; do [ $(cat $disk/size) = {DISK // 512} ] && echo /dev/${{disk##*/}}; done; true")[-1]
            place.begin({"one": f"reads {data} {DISK // MIB} 20000 1"})
            reads = place.measure(["one"], seconds)["one"]
            shown = place.host.aquifer("group", "show", "blue")["cache"]
            found[setting] = {"reads_per_s": reads, "kb_per_s": reads * 4.096, "given_mib": place.given(), "cache_mib": shown["used"] / MIB, "hits": shown["hits"], "misses": shown["misses"]}
            place.errors()
    for one in found.values():
        one["beside_nobody"] = one["reads_per_s"] / found["nobody"]["reads_per_s"]
    return found


def swap(seconds: int) -> dict:
    found = {}
    for setting in ("disk", "remote"):
        with Place() as there:
            tls = there.host.dir / "tls"
            there.host.aquifer("init", "--dir", tls, "--host", "there", "--address", "127.0.0.1", "--host", "here", "--address", "127.0.0.1")
            there.host.aquifer("group", "create", "blue")
            there.host.start([AQUIFER, "--run-dir", there.host.run_dir, "group", "cache", "blue", "--lend", "127.0.0.1:0", "--tls", tls / "there/tls"])
            lending = lambda: there.host.aquifer("group", "show", "blue")["cache"]
            wait("the lender's cache", lambda: lending() is not None)
            port = lending()["lends"][0].rsplit(":", 1)[1]
            there.join("blue", ["two", "three"])
            there.settle(60)
            wait("the lender's cache to have memory", lambda: lending()["size"] > 64 * MIB, 60, 0.5)
            agreement = (there.host.dir / "groups/blue.toml").read_text()
            with Place() as here, Throttled(here.host.dir, 300, 300) as cgroup:
                (here.host.dir / "groups").mkdir()
                (here.host.dir / "groups/blue.toml").write_text(agreement)
                borrows = ["--lender", f"nbds://127.0.0.1:{port}/", "--lender-host", "there", "--tls", tls / "here/tls"] if setting == "remote" else []
                here.host.start([AQUIFER, "--run-dir", here.host.run_dir, "group", "cache", "blue", "--cgroup", cgroup, "--size", "0", *borrows])
                wait("the cache", lambda: here.host.aquifer("group", "show", "blue")["cache"] is not None)
                here.join("blue", ["one"], cached=True)
                here.settle(0)
                here.begin({"one": memory(1, 200, 100000)})
                pages = here.measure(["one"], seconds)["one"]
                shown = here.host.aquifer("group", "show", "blue")["cache"]
                found[setting] = {"pages_per_s": pages, "cache_read_mib": shown["read_bytes"] / MIB, "cache_written_mib": shown["written_bytes"] / MIB, "lender_size_mib": lending()["size"] / MIB}
                for lender in shown["lenders"]:
                    found[setting] |= {f"{key}_mib": lender[f"{key}_bytes"] / MIB for key in ("sent", "read", "dropped", "wrong")}
                here.errors()
            there.errors()
    found["remote"]["beside_disk"] = found["remote"]["pages_per_s"] / found["disk"]["pages_per_s"]
    return found


class Throttled:
    """A cgroup whose reads are so many a second at most, and its writes, of the disk where a directory is."""

    def __init__(self, directory: Path, reads: int, writes: int | None = None):
        number = os.stat(directory).st_dev
        most = {"read": reads} | ({"write": writes} if writes else {})
        self.rules = {way: f"{os.major(number)}:{os.minor(number)} {rate}" for way, rate in most.items()}
        self.path = Path(f"/sys/fs/cgroup/blkio/aquifer-lab-{os.getpid()}")

    def __enter__(self) -> Path:
        self.path.mkdir()
        try:
            for way, rule in self.rules.items():
                (self.path / f"blkio.throttle.{way}_iops_device").write_text(rule)
        except OSError as error:
            self.path.rmdir()
            raise Failed(f"a disk cannot be limited to {self.rules}: {error}") from error
        return self.path

    def __exit__(self, *_) -> None:
        for process in (self.path / "cgroup.procs").read_text().split():
            Path("/sys/fs/cgroup/blkio/cgroup.procs").write_text(process)
        self.path.rmdir()


def picture(what: str, found: dict, path: Path) -> None:
    """What was done, as bars; and what VMs had meanwhile, second by second."""
    from picture import COLOURS, grouped, panels, save
    titles = {"policies": "Two of four guests work (Groups, Fig. 8 and 10)", "hog": "A group beside one that uses all it can get (Groups, Fig. 11 and 12)",
              "lend": "A group is idle, then works, beside one that works (Groups, Fig. 14 and 15)", "cache": "Random reads of a disk (Groups, Table 2)", "swap": "A guest swaps to its disk, and to another host (Groups, Fig. 17)"}
    works = {"policies": {"work of both": lambda one: sum(one["pages_per_s"].values())}, "hog": {"work of the group": lambda one: one["pages_per_s"]},
             "lend": {"the busy group, while the other is idle": lambda one: one["busy_pages_per_s"], "the idle group, when it works": lambda one: one["then_idle_pages_per_s"],
                      "the busy group, then": lambda one: one["then_busy_pages_per_s"]},
             "cache": {"reads": lambda one: one["reads_per_s"]}, "swap": {"work": lambda one: one["pages_per_s"]}}[what]
    timed = [(setting, one["history"]) for setting, one in found.items() if "history" in one]
    figure, axes = panels(titles[what], 1 + len(timed), width=4.2 if timed else 6.4)
    first = axes[0][0]
    grouped(first, list(found), {name: ([work(one) for one in found.values()], COLOURS[at], None) for at, (name, work) in enumerate(works.items())})
    first.set_title("pages a second")
    first.tick_params(axis="x", labelsize=8)
    if len(works) > 1:
        first.legend(fontsize=7)
    top = max((size for _, history in timed for turn in history for group in turn.values() for size in [group["saved"], *group["vms"].values()]), default=0)
    for panel, (setting, history) in zip(axes[0][1:], timed):
        names = sorted({(group, vm) for turn in history for group, one in turn.items() for vm in one["vms"]})
        for at, (group, vm) in enumerate(names):
            panel.plot([turn.get(group, {"vms": {}})["vms"].get(vm, float("nan")) for turn in history], label=f"{vm} has", color=COLOURS[at])
        for at, group in enumerate(sorted({group for group, _ in names})):
            panel.plot([turn.get(group, {"saved": float("nan")})["saved"] for turn in history], label=f"group {group} saves", color="#333333", linestyle=["--", ":"][at % 2])
        panel.set_title(setting)
        panel.set_ylim(0, top * 1.05)
        panel.set_xlabel("s")
        panel.set_ylabel("MiB")
        panel.legend(fontsize=7, loc="lower right")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["policies", "hog", "lend", "cache", "swap"])
    parser.add_argument("--seconds", type=int, default=40, help="that work is counted for")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rounds = []
    for _ in range(args.rounds):
        rounds.append({"policies": policies, "hog": hog, "lend": lend, "cache": cache, "swap": swap}[args.what](args.seconds))
        for setting, one in rounds[-1].items() if not args.json else ():
            shown = {key: value for key, value in one.items() if key != "history"}
            print(f"{setting:>12}: " + "; ".join(f"{key} {json.dumps(value) if isinstance(value, dict) else f'{value:.2f}'}" for key, value in shown.items()), flush=True)
    if args.picture:
        picture(args.what, rounds[-1], args.picture)
    if args.json:
        print(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
