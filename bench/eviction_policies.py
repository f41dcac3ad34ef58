#!/usr/bin/python3 -B
"""Which pages leave, and when: every policy with both schemes, on memory that is 25, 50 and 75 % remote (Disaggregation, Figs. 4 and 5).

The link is emulated, nothing else is measured: a page takes 4 us, and the next one waits for it, as in the paper. Two loads: `hot`, whose working set is small (nine of ten touches go to an
eighth of the pages), and `uniform`, whose working set is all of it; each touch checks or changes a page. For each: how long a remote fault takes, and
what of that is the link, what is waiting for a page that has to leave first, and what is the rest; remote faults; and the time of the load
beside that of the same load in local memory. Wanted: faults with pre-evict at least 17 % faster than on demand. Each round has its runs in an
order by chance, with the load in local memory before and after; figures are medians. `--picture` draws both figures of the paper.

Build first: cargo build --release --workspace --lib --bins --examples

Usage: lab/policies [--rounds N] [--link TIME] [--any-number] [--picture FILE.png] [--json]      (as root, on a machine that does nothing else)
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT = Path(os.environ.get("AQUIFER_BUILT", ROOT / "target/release"))
AQUIFER = BUILT / "aquifer"
MIB = 96
TOUCHES = 20000
POLICIES = ["round-robin", "clock", "fifo", "random", "sieve"]
SCHEMES = ["on-demand", "pre-evict"]
LOADS = ["hot", "uniform"]
WORKING_SET = {"hot": "small working set", "uniform": "large working set"}
REMOTE = [25, 50, 75]


def aquifer(run_dir: str, *words: str) -> dict:
    done = subprocess.run([AQUIFER, "--json", "--run-dir", run_dir, *words], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def touches(memory: str, load: str) -> float:
    """Seconds of the load's touches."""
    command = [BUILT / "examples/touches", memory, "fill", "write", load, str(TOUCHES)]
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return done["touches"] / done["pages_per_s"]


def measure(run_dir: str, link: list, load: str, remote: int, policy: str, scheme: str) -> dict:
    try:
        created = aquifer(run_dir, "region", "create", "policies", "--size", f"{MIB}M", "--cache", f"{MIB * (100 - remote) // 100}M",
                          *link, "--prefetch", "off", "--policy", policy, "--scheme", scheme)
        seconds = touches(created["file"], load)
        counts = aquifer(run_dir, "region", "show", "policies")["counts"]
    finally:
        subprocess.run([AQUIFER, "--run-dir", run_dir, "region", "rm", "policies"], capture_output=True)
    faults = max(counts["remote_faults"], 1)
    return {"remote_faults": counts["remote_faults"], "seconds": seconds, "fault_us": counts["remote_ns"] / faults / 1e3,
            "link_us": counts["link_ns"] / faults / 1e3, "room_us": counts["room_ns"] / faults / 1e3}


def measure_all(rounds: int, link: list) -> dict:
    """{(load, remote, policy, scheme): [a run of each round]}."""
    kinds = [(load, remote, policy, scheme) for load in LOADS for remote in REMOTE for policy in POLICIES for scheme in SCHEMES]
    runs, local = {kind: [] for kind in kinds}, {load: [] for load in LOADS}
    with tempfile.TemporaryDirectory(prefix="policies-") as run_dir:
        for _ in range(rounds):
            for kind in [None, *random.sample(kinds, len(kinds)), None]:
                if kind is not None:
                    runs[kind].append(measure(run_dir, link, *kind))
                    continue
                for load in LOADS:
                    local[load] += [touches(f"{MIB}M", load) for _ in range(3)]
    for (load, *_), of in runs.items():
        for run in of:
            run["slowdown"] = run.pop("seconds") / statistics.median(local[load])
    return runs


def rest(of: dict) -> float:
    return of["fault_us"] - of["link_us"] - of["room_us"]


def draw(file: str, middle: dict, link: str) -> None:
    import picture

    figure, rows = picture.panels(f"Which pages leave, and when: {MIB} MiB, emulated link of {link}", 2, 3, width=8, height=3.9)
    names = [(policy, scheme) for policy in POLICIES for scheme in SCHEMES]
    for column, load in enumerate(LOADS):
        def of(what, policy, scheme):
            return [what(middle[load, remote, policy, scheme]) for remote in REMOTE]

        # The paper's figure is of one split; here the middle one.
        faults, remotes, slow = (rows[row][column] for row in range(3))
        lines = [middle[load, 50, *name] for name in names]
        picture.stacked(faults, [f"{policy}\n{scheme}" for policy, scheme in names],
                        {"link": [line["link_us"] for line in lines], "waits for room": [line["room_us"] for line in lines],
                         "the rest": [rest(line) for line in lines]})
        faults.set(title=f"A remote fault's time, 50 % remote ({WORKING_SET[load]}: {load})", ylabel="us a fault")
        for panel, what, title, unit in ((remotes, "remote_faults", "Remote faults", "faults"),
                                         (slow, "slowdown", "Slowdown beside local memory", "times as long")):
            picture.grouped(panel, [f"{remote} % remote" for remote in REMOTE],
                            {f"{policy}, {scheme}": (of(lambda line: line[what], policy, scheme), picture.COLOURS[POLICIES.index(policy)],
                                                     "" if scheme == "pre-evict" else "////") for policy, scheme in names})
            panel.set(title=f"{title} ({load})", ylabel=unit)
        if column == 0:
            faults.legend(loc="upper right", fontsize=8, ncols=3)
            remotes.legend(loc="upper left", fontsize=8, ncols=2)
    top = max(panel.get_ylim()[1] for panel in rows[0])
    for panel in rows[0]:
        panel.set_ylim(0, top * 1.15)
    picture.save(figure, file)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--link", default="4us")
    parser.add_argument("--any-number", action="store_true", help="any number of pages on the link at a time, not one")
    parser.add_argument("--picture", metavar="FILE.png")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    link = ["--emulate-link", args.link] + ([] if args.any_number else ["--one-at-a-time"])
    results = measure_all(args.rounds, link)
    middle = {key: {of: statistics.median(run[of] for run in runs) for of in runs[0]} for key, runs in results.items()}
    if args.picture:
        draw(args.picture, middle, f"{args.link} a page" + ("" if args.any_number else ", one at a time"))
    if args.json:
        print(json.dumps([dict(zip(("load", "remote", "policy", "scheme"), key)) | of for key, of in middle.items()]))
        return
    print(f"{'load':<9}{'remote':>7}  {'policy':<12}{'scheme':<10}{'fault us':>9}{'link':>7}{'room':>7}{'rest':>7}{'faults':>9}{'slowdown':>10}")
    for (load, remote, policy, scheme), of in middle.items():
        print(f"{load:<9}{remote:>6} %  {policy:<12}{scheme:<10}{of['fault_us']:9.1f}{of['link_us']:7.1f}{of['room_us']:7.1f}{rest(of):7.1f}"
              f"{of['remote_faults']:9.0f}{of['slowdown']:10.1f}")
    print()
    for load in LOADS:
        saved = [1 - middle[load, remote, policy, "pre-evict"]["fault_us"] / middle[load, remote, policy, "on-demand"]["fault_us"]
                 for remote in REMOTE for policy in POLICIES]
        print(f"{load}: faults with pre-evict beside on demand: {100 * statistics.median(saved):.0f} % faster "
              f"({100 * min(saved):.0f} to {100 * max(saved):.0f}; wanted: at least 17)")


if __name__ == "__main__":
    main()
