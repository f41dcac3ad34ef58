#!/usr/bin/python3 -B
"""Compares all eviction policies, with both schemes, at 25 to 75 % remote ([Lim12] Figs. 4 and 5).

Only the emulated link separates the region from its pages. As in the paper, a page takes 4 us, and
the next page waits for it. Two loads check or change a page with each touch: `hot` has a small
working set (nine of ten touches go to an eighth of the pages), and `uniform` uses all pages. For
each, the script measures the time of a remote fault, the part of it that is the link, the part that
waits for an eviction, the number of remote faults, and the time of the load beside the same load in
local memory. Target: with pre-evict, faults are at least 17 % faster than on demand.

Each round runs all combinations in random order, with the load in local memory before and after.
The figures are medians. `--picture` draws both figures of the paper. Build first:
    cargo build --release --workspace --lib --bins --examples

Usage: bench/eviction_policies.py [--rounds N] [--link TIME] [--any-number] [--picture FILE.png]
    [--json]      (as root, on an otherwise idle machine)
"""

import json
import os
import random
import statistics
import tempfile

from common import bench
from common.bench import EXAMPLES
from common.lender import remove_region

MIB = 96
TOUCHES = 20000
POLICIES = ["round-robin", "clock", "fifo", "random", "sieve"]
SCHEMES = ["on-demand", "pre-evict"]
LOADS = ["hot", "uniform"]
WORKING_SET = {"hot": "small working set", "uniform": "large working set"}
REMOTE = [25, 50, 75]


def touches(memory: str, load: str) -> float:
    """Returns the seconds that the load's touches take."""
    done = json.loads(
        bench.run(EXAMPLES / "touches", memory, "fill", "write", load, str(TOUCHES))
    )
    return done["touches"] / done["pages_per_s"]


def measure(run_dir: str, link: list, load: str, remote: int, policy: str, scheme: str) -> dict:
    env = os.environ | {"AQUIFER_RUN_DIR": run_dir}
    try:
        created = bench.aquifer(
            "region", "create", "policies", "--size", f"{MIB}M",
            "--cache", f"{MIB * (100 - remote) // 100}M", *link, "--prefetch", "off",
            "--policy", policy, "--scheme", scheme, env=env,
        )
        seconds = touches(created["file"], load)
        counts = bench.aquifer("region", "show", "policies", env=env)["counts"]
    finally:
        remove_region("policies", env)
    faults = max(counts["remote_faults"], 1)
    return {
        "remote_faults": counts["remote_faults"],
        "seconds": seconds,
        "fault_us": counts["remote_ns"] / faults / 1e3,
        "link_us": counts["link_ns"] / faults / 1e3,
        "room_us": counts["room_ns"] / faults / 1e3,
    }


def measure_all(rounds: int, link: list) -> dict:
    """Returns {(load, remote, policy, scheme): the medians of all rounds}."""
    kinds = [
        (load, remote, policy, scheme)
        for load in LOADS for remote in REMOTE for policy in POLICIES for scheme in SCHEMES
    ]
    runs: dict = {kind: [] for kind in kinds}
    local: dict = {load: [] for load in LOADS}
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
    return {
        kind: {key: statistics.median(run[key] for run in of) for key in of[0]}
        for kind, of in runs.items()
    }


def time_saved(medians: dict) -> dict:
    """By load, the share of a remote fault's time that pre-evict saves beside on-demand."""
    saved = {}
    for load in LOADS:
        pairs = [
            [medians[load, remote, policy, scheme]["fault_us"] for scheme in SCHEMES]
            for remote in REMOTE for policy in POLICIES
        ]
        saved[load] = bench.spread(1 - ahead / demand for demand, ahead in pairs)
    return saved


def rest(of: dict) -> float:
    return of["fault_us"] - of["link_us"] - of["room_us"]


def draw(file: str, medians: dict, link: str) -> None:
    from common import picture

    title = f"Eviction policies and schemes: {MIB} MiB, emulated link of {link}"
    figure, rows = picture.panels(title, 2, 3, width=8, height=3.9)
    names = [(policy, scheme) for policy in POLICIES for scheme in SCHEMES]
    colour = lambda policy: picture.COLOURS[POLICIES.index(policy)]
    hatch = lambda scheme: "" if scheme == "pre-evict" else "////"
    for column, load in enumerate(LOADS):
        faults, remotes, slow = (rows[row][column] for row in range(3))
        # The paper's figure shows one split between local and remote; this one shows 50 %.
        lines = [medians[load, 50, *name] for name in names]
        picture.stacked(faults, [f"{policy}\n{scheme}" for policy, scheme in names], {
            "link": [line["link_us"] for line in lines],
            "waits for a frame": [line["room_us"] for line in lines],
            "the rest": [rest(line) for line in lines],
        })
        title = f"A remote fault's time, 50 % remote ({WORKING_SET[load]}: {load})"
        faults.set(title=title, ylabel="us a fault")
        for panel, key, title, unit in (
            (remotes, "remote_faults", "Remote faults", "faults"),
            (slow, "slowdown", "Slowdown beside local memory", "times as long"),
        ):
            bars = {
                f"{policy}, {scheme}": (
                    [medians[load, remote, policy, scheme][key] for remote in REMOTE],
                    colour(policy), hatch(scheme),
                )
                for policy, scheme in names
            }
            picture.grouped(panel, [f"{remote} % remote" for remote in REMOTE], bars)
            panel.set(title=f"{title} ({load})", ylabel=unit)
        if column == 0:
            faults.legend(loc="upper right", fontsize=8, ncols=3)
            remotes.legend(loc="upper left", fontsize=8, ncols=2)
    top = max(panel.get_ylim()[1] for panel in rows[0])
    for panel in rows[0]:
        panel.set_ylim(0, top * 1.15)
    picture.save(figure, file)


def report(result: dict) -> None:
    head = f"{'fault us':>9}{'link':>7}{'frame':>7}{'rest':>7}{'faults':>9}{'slowdown':>10}"
    print(f"{'load':<9}{'remote':>7}  {'policy':<12}{'scheme':<10}{head}")
    for load in LOADS:
        for remote, policies in result["medians"][load].items():
            for policy, schemes in policies.items():
                for scheme, of in schemes.items():
                    print(
                        f"{load:<9}{remote:>6} %  {policy:<12}{scheme:<10}{of['fault_us']:9.1f}"
                        f"{of['link_us']:7.1f}{of['room_us']:7.1f}{rest(of):7.1f}"
                        f"{of['remote_faults']:9.0f}{of['slowdown']:10.1f}"
                    )
    print()
    for load, of in result["time_saved"].items():
        median, low, high = (100 * of[key] for key in ("median", "lowest", "highest"))
        print(
            f"{load}: faults with pre-evict are {median:.0f} % faster than on demand "
            f"({low:.0f} to {high:.0f}); target: at least 17"
        )


def nested(medians: dict) -> dict:
    """Turns the keys of `medians` into an object of objects, as JSON needs it."""
    result: dict = {}
    for (load, remote, policy, scheme), of in medians.items():
        policies = result.setdefault(load, {}).setdefault(str(remote), {})
        policies.setdefault(policy, {})[scheme] = of
    return result


def main() -> None:
    parser = bench.arguments(__doc__, rounds=3, picture=True)
    parser.add_argument("--link", default="4us", help="time of a page on the link")
    parser.add_argument(
        "--any-number", action="store_true", help="pages on the link do not wait for one another"
    )
    args = bench.parse(parser)
    link = ["--emulate-link", args.link] + ([] if args.any_number else ["--one-at-a-time"])
    medians = measure_all(args.rounds, link)
    if args.picture:
        text = f"{args.link} a page" + ("" if args.any_number else ", one at a time")
        draw(args.picture, medians, text)
    bench.finish({"medians": nested(medians), "time_saved": time_saved(medians)}, report)


if __name__ == "__main__":
    bench.start(main)
