#!/usr/bin/env python3
"""How long a planned stop of a lender takes, and whether it loses anything (aquifer drain under load).

Real agents as in lab/recall. A borrows of B and swaps checked content to it, and goes on rewriting it. Then B is drained: A
moves all of it to another lender or (where nobody has room) to its own spill file. Each round measures from the order to
its end, has B stopped, and then has every byte checked. Needs root and swap:
    cargo build --release -p aquifer-cli

Usage: lab/drain [--rounds N] [--lease 1G] [--protocol nbd|nvme-tcp] [--json]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path


def load_recall():
    """The hosts and programs of lab/recall, whose file has no suffix."""
    path = Path(__file__).with_name("recall")
    spec = spec_from_loader("recall", SourceFileLoader("recall", str(path)))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


recall = load_recall()
MIB = recall.MIB


def drain(host) -> dict:
    """Drains a host. Returns the time, and what was reported on the way."""
    began = time.monotonic()
    done = subprocess.run(
        [recall.AQUIFER, "drain", "--json", "--socket", host.socket], capture_output=True, text=True
    )
    took = time.monotonic() - began
    if done.returncode != 0:
        raise SystemExit(f"lab/drain: {done.stderr}")
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    if reports[-1]["left"] or host.status()["lent"]:
        raise SystemExit(f"lab/drain: not all is back: {reports[-1]}")
    stored = sum(left["bytes"] for left in reports[0]["left"])
    return {"stored": stored, "seconds": took, "reports": len(reports)}


def measure(where: str, lease: int, protocol: str) -> dict:
    """One drain of all that is stored in a lease, and the check of every byte after it."""
    names = ["a", "b", "c"] if where == "lender" else ["a", "b"]
    with tempfile.TemporaryDirectory(prefix="aquifer-lab-") as place:
        work, hosts, programs = Path(place), {}, []
        init = [part for name in names for part in ("--host", name, "--address", recall.ADDRESSES[name])]
        recall.run(recall.AQUIFER, "init", "--dir", work / "cluster", *init)
        try:
            # c comes when b has lent: a borrows from whoever can spare most.
            for name in ("a", "b"):
                memory = lease // 4 if name == "a" else lease * 5 // 2
                hosts[name] = recall.Host(name, names, memory, work, protocol)
            hosts["a"].borrow(lease + lease // 8)
            programs.append(hosts["a"].load(lease + lease // 8))
            programs[0].wait_for("filled")
            if where == "lender":
                hosts["c"] = recall.Host("c", names, lease * 5 // 2, work, protocol)
            programs[0].order("rewrite")
            result = drain(hosts["b"])
            hosts.pop("b").stop()
            programs[0].wait_for("filled")
            programs[0].verify()
            [volume] = hosts["a"].status()["borrowed"]
            if (volume["spilled"] > 0) != (where == "spill"):
                raise SystemExit(f"lab/drain: it did not go to the {where}: {volume}")
            result |= {"where": where, "checked": programs[0].pages * 4096}
            return result | {"seconds_per_gib": result["seconds"] * (1 << 30) / result["stored"]}
        finally:
            for program in programs:
                program.stop()
            for host in hosts.values():
                host.stop()
            recall.run("rm", "-rf", f"/dev/shm/{work.name}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lease", type=recall.size, default="1G")
    parser.add_argument("--protocol", choices=["nbd", "nvme-tcp"], default="nbd")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = []
    for number in range(arguments.rounds):
        for where in ("lender", "spill"):
            results.append(measure(where, arguments.lease, arguments.protocol))
            last = results[-1]
            print(
                f"round {number + 1}: to the {where}: {last['stored'] / MIB:.0f} MiB in {last['seconds']:.2f} s, "
                f"{last['checked'] / MIB:.0f} MiB checked, none wrong",
                file=sys.stderr,
            )
    if arguments.json:
        print(json.dumps(results))
        return
    print(f"{'moves to':20} {'s a GiB':>8} {'(lowest-highest)':>18}")
    for where, name in (("lender", "another lender"), ("spill", "a local file")):
        times = [result["seconds_per_gib"] for result in results if result["where"] == where]
        spread = f"({min(times):.2f}-{max(times):.2f})"
        print(f"{name:20} {statistics.median(times):8.2f} {spread:>18}")


if __name__ == "__main__":
    main()
