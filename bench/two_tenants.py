#!/usr/bin/python3 -B
"""Measures two tenants with eight guests on two hosts, under a load that changes all the time.

Each tenant is a group with four emulated guests, two on each host. A guest checks and rewrites
pages of its own memory, at random; four of five visits go to a third of them. Work is the number of
visits. Phases change the memory and the visits that guests want: one tenant is busy, most of all on
one host, or both are, on one host. The host is then short of memory, and the other one is not.
Memory that a guest frees goes back to its host (free page reporting).

`aquifer`: a cluster of two hosts. The VMs have `--cache auto`, and the agents decide everything.
`swap`: the same guests without Aquifer, in one cgroup for each host, swap to a file on the disk.
`halves`: the same, but each guest has a fixed share of its host's RAM, in a cgroup of its own.

In all of them a memory cgroup enforces the RAM of each host, and the swap file is there. With
Aquifer it can take memory of QEMU itself, and none of the guests'. Needs root, QEMU and iproute2.
Build first:
    cargo build --release --workspace --lib --bins --examples

Usage: bench/two_tenants.py [--minutes 30] [--baseline-minutes N] [--seed 1]
    [--arrangements aquifer,swap,halves] [--json]
"""

import contextlib
import json
import random
import subprocess
import time
from pathlib import Path

from group_surplus import Throttled
from common import bench
from common.bench import AQUIFER, MIB, note
from common.hosts import Cluster, DIR, Host
from common.tenants import (
    GUESTS, HOSTS, MACHINE, TENANTS, Boot, Cgroup, Guest, Plain, Site, Swap, tail,
)

ARRANGEMENTS = ("aquifer", "swap", "halves")
# What a guest keeps, in MiB, and the most pages that it visits a second.
SMALL, MIDDLE, LARGE = (16, 500), (240, 8000), (416, 12000)
# An agent recalls and shrinks caches above the first share of RAM, and grows them below the second.
UPPER, LOWER = 0.88, 0.75
STATE = Path("run/aquifer")
# A cache that an agent sizes keeps this share of its VM's memory.
LEAST_SHARE = 0.25
SAMPLE_S = 2


class AgentHost(Host):
    """A simulated host: all of its processes run in a cgroup, which the agent manages."""

    def __init__(self, bridge, number: int, cgroup: Cgroup, site: Site):
        self.cgroups = [cgroup.path, *([site.disk] if site.disk else [])]
        self.cgroup, self.spill = cgroup, site.boot.dir / f"spill-{number}"
        super().__init__(bridge, number)
        self.root = Path(f"/proc/{self.pid}/root")
        self.regions = self.root / STATE / "regions"

    def command(self, *words) -> list:
        enter = "".join(f"echo 0 > {path}/cgroup.procs && " for path in self.cgroups)
        groups = f"AQUIFER_GROUPS={DIR}/groups"
        return super().command("sh", "-c", f'{enter} exec "$@"', "sh", "env", groups, *words)

    def start(self) -> None:
        config = self.root / DIR.lstrip("/") / "agent.toml"
        text = config.read_text()
        sections = {
            "memory": f'cgroup = "{self.cgroup.path}"\nupper = {UPPER}\nlower = {LOWER}\n'
                      # The kernel's signal is of both hosts together.
                      "pressure = 0.0\n",
            # A device would be swap of both hosts.
            "borrow": f'enabled = false\nspill = "{self.spill}"\n',
            "vms": 'accept = true\nmove_after = "30s"\n',
            "groups": f'agreements = "{DIR}/groups"\n',
        }
        for name, lines in sections.items():
            text = text.replace(f"[{name}]\n", f"[{name}]\n{lines}", 1)
        config.write_text(text)
        log = self.root / DIR.lstrip("/") / "agent.log"
        words = self.command(AQUIFER, "serve", "agent", "--config", f"{DIR}/agent.toml")
        self.agent = subprocess.Popen(words, stderr=log.open("w"))

    def records(self) -> dict:
        """Returns the records of this host's regions by name."""
        found = {}
        for path in self.regions.glob(".*/record.json"):
            try:
                found[path.parent.name[1:]] = json.loads(path.read_text())
            except (OSError, ValueError):
                pass
        return found


class Aquifer(Site):
    """The cluster. Nothing but the load comes from outside once the VMs run."""

    def __init__(self, *where):
        super().__init__(*where)
        self.cluster = Cluster(self.make_host)
        self.places: dict = {}
        self.decisions: dict = {}
        self.recalled: set = set()
        self.episodes = dict.fromkeys(HOSTS, 0)
        self.over = dict.fromkeys(HOSTS, False)
        self.least_cache: dict = {}
        self.samples = self.wrong_ledgers = 0
        self.most_stored = self.most_saved = 0

    def make_host(self, bridge, number: int) -> AgentHost:
        return AgentHost(bridge, number, self.cgroup(HOSTS[number - 1], self.ram), self)

    @property
    def hosts(self) -> list:
        return self.cluster.hosts

    def start(self) -> None:
        first = self.cluster.add()
        self.cluster.add()
        for tenant in TENANTS:
            most = f"{2 * GUESTS * self.memory}"
            first.aquifer("group", "create", tenant, "--member", f"{tenant}-*",
                          "--max-members", 2 * GUESTS, "--max-memory", most)
        for guest in self.guests:
            self.hosts[guest.home].aquifer(
                "vm", "create", guest.name, "--memory", self.memory,
                "--group", guest.tenant, "--overcommit", "--restart", "no",
                "--machine", MACHINE, "--accel", "tcg", "--kernel", self.boot.kernel,
                "--initrd", self.boot.initrd, "--append", self.boot.append_of(guest),
            )

    def of(self, guest: Guest, file: str) -> list:
        """Returns the paths of a VM's file on all hosts."""
        return [host.root / STATE / "vms" / guest.name / file for host in self.hosts]

    def tell(self, guest: Guest, line: str) -> None:
        # During a move the VM has a serial port on both hosts.
        for path in self.of(guest, "serial"):
            self.serials.send(path, line)

    def consoles(self) -> dict:
        return {guest: "".join(map(tail, self.of(guest, "console.log"))) for guest in self.guests}

    def used(self) -> dict:
        return {host.name: host.cgroup.used() for host in self.hosts}

    def has(self) -> dict:
        has, caches = dict.fromkeys(TENANTS, 0), {}
        for host in self.hosts:
            for name, record in host.records().items():
                try:
                    taken = (host.regions / name).stat().st_blocks * 512
                except OSError:
                    continue
                has[name.split("-")[0]] += taken
                caches[name] = max(caches.get(name, 0), record["cache"])
        for tenant in TENANTS:
            of = [cache for name, cache in caches.items() if name.startswith(tenant)]
            if len(of) == 2 * GUESTS:
                self.least_cache[tenant] = min(self.least_cache.get(tenant, sum(of)), sum(of))
        return has

    def sample(self) -> None:
        super().sample()
        stored = saved = 0
        for host in self.hosts:
            status = host.aquifer("status")
            self.samples += 1
            ledger, memory = status["ledger"], status["memory"]
            classes = sum(value for name, value in ledger.items()
                          if name not in ("total", "overcommitted"))
            self.wrong_ledgers += classes != ledger["total"] + ledger["overcommitted"]
            over = memory["used"] > memory["upper"]
            self.episodes[host.name] += over and not self.over[host.name]
            self.over[host.name] = over
            for lent in status["lent"]:
                stored += lent["stored"]
                if lent["state"] == "asked back":
                    self.recalled.add(lent["lease"])
            saved += sum(scanner["saved"] for scanner in status.get("scanners", []))
            for decision in status["decisions"]:
                self.decisions[decision["at"], host.name, decision["what"]] = True
        self.most_stored = max(self.most_stored, stored)
        self.most_saved = max(self.most_saved, saved)

    def dead(self) -> int:
        return sum(
            vm["state"] != "running" for host in self.hosts for vm in host.aquifer("vm", "list")
        )

    def figures(self) -> dict:
        begins = lambda start: sum(what.startswith(start) for _, _, what in self.decisions)
        borrows = sum(
            what.startswith("borrows ") and " as lease " in what for _, _, what in self.decisions
        )
        floor = 2 * GUESTS * self.memory * LEAST_SHARE
        return super().figures() | {
            "floor_mib": floor / MIB,
            "least_cache_mib": {name: least / MIB for name, least in self.least_cache.items()},
            "floors_kept": all(least >= floor for least in self.least_cache.values()),
            "moves": begins("moved VM "), "borrows": borrows,
            "shrinks": begins("shrinks the cache"), "grows": begins("grows the cache"),
            "failed_changes": begins("cannot change the cache"), "recalls": len(self.recalled),
            "overload_episodes": self.episodes, "wrong_ledgers": self.wrong_ledgers,
            "samples": self.samples, "most_stored_mib": self.most_stored / MIB,
            "most_saved_mib": self.most_saved / MIB,
            "decisions": {
                f"{number:04} {host} {time.strftime('%T', time.gmtime(at))}": what
                for number, (at, host, what) in enumerate(sorted(self.decisions))
            },
        }

    def tell_state(self) -> None:
        """Reports what is known of a run that failed."""
        for key, value in self.figures().items():
            if key != "decisions":
                note(f"{key}: {value}")
        for at, host, what in sorted(self.decisions)[-60:]:
            note(f"{time.strftime('%T', time.gmtime(at))} {host}: {what}")
        for host in self.hosts:
            note(tail(host.root / DIR.lstrip("/") / "agent.log", 3000))

    def end_guests(self) -> None:
        for host in self.hosts:
            words = [["vm", "stop", guest.name, "--force"] for guest in self.guests]
            for word in words:
                subprocess.run(host.command(AQUIFER, *word), capture_output=True)
        self.cluster.__exit__()


def phases(seed: int, minutes: float, length: float) -> list:
    """Returns the phases: seconds, a title, and the wants of each guest."""
    chance = random.Random(seed)
    kinds = [*TENANTS, HOSTS[0]]
    made, total = [], 0.0
    while total < 60 * minutes:
        kind = kinds[len(made)] if len(made) < 3 else chance.choice(
            [one for one in (*TENANTS, *HOSTS) if one != made[-1]["kind"]])
        seconds = min(length * chance.uniform(0.8, 1.2), 60 * minutes - total)
        on = HOSTS.index(kind) if kind in HOSTS else chance.randrange(len(HOSTS))
        made.append({"kind": kind, "host": HOSTS[on], "seconds": seconds})
        total += seconds
    return made


def wants(phase: dict, guest: Guest) -> tuple:
    is_here = HOSTS[guest.home] == phase["host"]
    if phase["kind"] in HOSTS:
        mib, rate = MIDDLE if is_here else SMALL
    elif phase["kind"] == guest.tenant:
        mib, rate = LARGE if is_here else (SMALL[0], LARGE[1])
    else:
        mib, rate = SMALL
    return mib, rate


def play(site: Site, plan: list) -> dict:
    """Runs the phases, and returns what the guests did in each."""
    def all_told() -> bool:
        site.look()
        return all(guest.last for guest in site.guests)

    bench.wait("the guests to boot", all_told, 180, 0.5)
    began, done = time.monotonic(), {}
    for phase in plan:
        before, since = site.counts(), time.monotonic()
        site.order({guest: wants(phase, guest) for guest in site.guests})
        while time.monotonic() < since + phase["seconds"]:
            time.sleep(SAMPLE_S)
            site.sample()
        after = site.counts()
        visits = dict.fromkeys(TENANTS, 0)
        for guest in site.guests:
            visits[guest.tenant] += after[guest.name]["visits"] - before[guest.name]["visits"]
        seconds = time.monotonic() - since
        done[f"{len(done) + 1:02}"] = phase | {"seconds": seconds, "visits": visits}
        note(f"  {phase['kind']:<6} on {phase['host']}: {seconds:4.0f} s, {visits}, "
             f"used {[round(used / MIB) for used in site.used().values()]} MiB")
    minutes = (time.monotonic() - began) / 60
    site.check()
    counts = site.counts().values()
    total = {key: sum(count[key] for count in counts) for key in ("written", "verified", "wrong")}
    per_minute = {
        tenant: sum(phase["visits"][tenant] for phase in done.values()) / minutes
        for tenant in TENANTS
    }
    return {
        "minutes": minutes, **total,
        # Each page is checked before its next version, before it is freed, and at the end.
        "unchecked": total["written"] - total["verified"] - total["wrong"],
        "visits_per_minute": per_minute | {"all": sum(per_minute.values())},
        "phases": done, **site.figures(),
    }


def beside(result: dict, baseline: str) -> dict:
    """Returns the work a minute relative to a baseline, over the phases that both completed."""
    ours, theirs = (result[name]["phases"] for name in ("aquifer", baseline))
    both = [key for key in ours if key in theirs]

    def rate(phases: dict, tenant: str) -> float:
        visits = sum(phases[key]["visits"][tenant] for key in both)
        return visits / sum(phases[key]["seconds"] for key in both)

    ratios = {tenant: rate(ours, tenant) / rate(theirs, tenant) for tenant in TENANTS}
    total = lambda phases: sum(rate(phases, tenant) for tenant in TENANTS)
    return ratios | {"all": total(ours) / total(theirs)}


def measure(given) -> dict:
    plan = phases(given.seed, given.minutes, given.phase_seconds)
    short = phases(given.seed, given.baseline_minutes or given.minutes, given.phase_seconds)
    ram, memory, result = given.ram * MIB, given.memory * MIB, {}
    with Boot() as boot, Swap(boot.dir, 2 * ram), contextlib.ExitStack() as stack:
        iops = given.disk_iops
        disk = stack.enter_context(Throttled(boot.dir, iops, iops)) if iops else None
        where = (boot, ram, memory, disk)
        for name in given.arrangements.split(","):
            note(name)
            make = {
                "aquifer": lambda: Aquifer(*where),
                "swap": lambda: Plain(*where, halves=False),
                "halves": lambda: Plain(*where, halves=True),
            }[name]
            with make() as site:
                try:
                    result[name] = play(site, plan if name == "aquifer" else short)
                except BaseException:
                    site.tell_state()
                    raise
    if "aquifer" in result:
        others = [name for name in result if name != "aquifer"]
        result["beside"] = {name: beside(result, name) for name in others}
    return result


ROWS = {
    "minutes": lambda one: f"{one['minutes']:.1f}",
    "pages written": lambda one: f"{one['written']:,}",
    "pages verified": lambda one: f"{one['verified']:,}",
    "pages wrong, unchecked": lambda one: f"{one['wrong']}, {one['unchecked']}",
    "guests killed, restarted, lost": lambda one: "{killed}, {restarted}, {lost}".format(**one),
    **{
        f"visits a minute, {who}": lambda one, who=who: f"{one['visits_per_minute'][who]:,.0f}"
        for who in (*TENANTS, "all")
    },
    "least memory of a tenant, MiB": lambda one: figures(one["least_memory_mib"]),
    "least cache of a tenant, MiB": lambda one: figures(one.get("least_cache_mib")),
    "its floor, MiB": lambda one: f"{one['floor_mib']:.0f}" if "floor_mib" in one else "-",
    "most RAM used, MiB": lambda one: figures(one["most_used_mib"]),
    "RAM of a host, MiB": lambda one: f"{one['ram_mib']:.0f}",
    "most swapped to the disk, MiB": lambda one: f"{one['most_swapped_mib']:.0f}",
    "most at a lender, MiB": lambda one: f"{one.get('most_stored_mib', 0):.0f}",
    **{
        name.replace("_", " "): lambda one, name=name: str(one.get(name, "-"))
        for name in ("moves", "borrows", "shrinks", "grows", "failed_changes", "recalls")
    },
    "overload episodes": lambda one: figures(one.get("overload_episodes")),
    "ledgers that do not add up": lambda one: str(one.get("wrong_ledgers", "-")),
}


def figures(of: dict | None) -> str:
    return ", ".join(f"{value:.0f}" for value in of.values()) if of else "-"


def report(result: dict) -> None:
    runs = {name: one for name, one in result.items() if name in ARRANGEMENTS}
    print(f"{'':<32}" + "".join(f"{name:>16}" for name in runs))
    for title, text in ROWS.items():
        print(f"{title:<32}" + "".join(f"{text(one):>16}" for one in runs.values()))
    for name, ratios in result.get("beside", {}).items():
        text = ", ".join(f"{who} {ratio:.2f}" for who, ratio in ratios.items())
        print(f"work a minute beside `{name}`: {text}")
    for name, one in runs.items():
        above = [host for host, most in one["most_used_mib"].items() if most > one["ram_mib"]]
        if above:
            print(f"{name}: {', '.join(above)} used more than its RAM")


def main() -> None:
    parser = bench.arguments(__doc__, None)
    parser.add_argument("--minutes", type=float, default=30, help="minutes of load (default: 30)")
    parser.add_argument("--baseline-minutes", type=float, help="minutes of `swap` and `halves`")
    parser.add_argument("--arrangements", default=",".join(ARRANGEMENTS))
    parser.add_argument("--seed", type=int, default=1, help="seed of the phases (default: 1)")
    parser.add_argument("--phase-seconds", type=float, default=150)
    parser.add_argument("--ram", type=int, default=1440, help="MiB of RAM of each host")
    parser.add_argument("--memory", type=int, default=512, help="MiB of memory of each guest")
    parser.add_argument("--disk-iops", type=int, help="most requests a second of the disk")
    given = bench.parse(parser)
    bench.require("qemu-system-x86_64", "ip", "mkswap")
    bench.finish(measure(given), report)


if __name__ == "__main__":
    bench.start(main)
