#!/usr/bin/python3 -B
"""VMs whose memory grows and shrinks while they run (Resizing: Table I, and what the paper's balancing is for). Guests are emulated.

`table`: a VM of 512 MiB grows to 2 GiB and shrinks again in steps of 512 MiB; how long each stage took, as Table I of the paper has them, min, max and
median; the same with pages that the guest's kernel zeroes (`init_on_alloc=1`, Debian's default); then rounds in which a program in the guest checks and
rewrites 200 MiB all the time, which have to move. Wanted: no errors of the guest's kernel, no page wrong, and the host's memory within 2 % of what it was.
`beside`: `aquifer vm resize` beside virtio-mem by hand (`requested-size` over QMP, then `size` each millisecond until it is that) and beside that with
waiting until the guest's MemTotal has come to be what it should, as a user has to do who wants to be sure; one VM, by turns in an order by chance.
Wanted: at most 1.1 times as long.
`balance`: two guests under one budget of 1,792 MiB, first one then the other needs 1 GiB: each with its half, and with `aquifer vm balance`; swap is a disk (a file of this host).
Wanted: no swap with the balancer. `pool`: a host with 256 MiB to spare has a VM grow to 1.5 GiB; the rest is with a lender, and goes back.

Build first: cargo build --release --workspace --lib --bins --examples

Usage: lab/resize table|beside|balance|pool [--rounds N] [--picture FILE.png] [--json]       (as root, on a machine that does nothing else)
"""

import argparse
import json
import random
import statistics
import sys
import time

import balancing
import pooling
from resizing import FOR_GROWTH, GROWTH, Host, Monitor, wait

MIB = 1 << 20
UP, DOWN = [1024, 1536, 2048], [1536, 1024, 512]
HOST = {"add": ["backend_reservation", "request_reply", "confirmation", "total"], "remove": ["request_reply", "backend_release", "total"]}
GUEST = {"add": ["page_table_build", "section_init", "onlining", "guest_subtotal"],
         "remove": ["offlining", "section_clean_up", "page_table_destroy", "sub_block_offlining", "guest_subtotal"]}


def stages(resized: dict) -> dict:
    """Microseconds by stage; what the guest did itself is without waiting for the host."""
    took = {stage["stage"]: stage["us"] for stage in resized["stages"]}
    if "guest_total" in took:
        took["guest_subtotal"] = took["guest_total"] - took.get("host_requests", 0)
    return took


def up_and_down(guest, took: dict) -> int:
    """A round; how many steps have not come to their end."""
    short = 0
    for way, steps in (("add", UP), ("remove", DOWN)):
        for size in steps:
            resized = guest.resize(f"{size}M", "--stages")
            short += resized["missing"] != 0 or resized["usable"] is False
            if resized["missing"] == 0:
                took[way].append(stages(resized))
    return short


def table(rounds: int, picture: str | None) -> dict:
    result = {"rounds": rounds}
    with Host() as host:
        guest = host.guest("table", "512M", "2G")
        up_and_down(guest, {"add": [], "remove": []})
        before, took = guest.host_bytes(), {"add": [], "remove": []}
        short = sum(up_and_down(guest, took) for _ in range(rounds))
        after = guest.host_bytes()
        result |= {"stages": {way: spreads(of) for way, of in took.items()}, "short": short, "host_before": before, "host_after": after,
                   "host_change": after / before - 1, "errors": guest.errors()}
        # What a program holds has to move, and stay what it is.
        guest.resize("2G")
        guest("churn 200 100 20 > /run/churn & echo $! > /run/churn.pid")
        wait("the program", lambda: guest("tail -n 1 /run/churn") != [])
        guest.resize("512M")
        busy = {"add": [], "remove": []}
        short = sum(up_and_down(guest, busy) for _ in range(max(rounds // 4, 1)))
        _, tick, pages, wrong = guest("tail -n 2 /run/churn | head -n 1")[0].split()
        guest("kill $(cat /run/churn.pid)")
        result["busy"] = {"rounds": max(rounds // 4, 1), "short": short, "pages_checked": int(pages), "wrong": int(wrong), "errors": guest.errors(),
                          "median_ms": {way: medians(of) for way, of in busy.items()}}
        host.stop("table")
        slow = host.guest("zeroes", "512M", "2G", kernel=FOR_GROWTH)
        took = {"add": [], "remove": []}
        up_and_down(slow, {"add": [], "remove": []})
        for _ in range(max(rounds // 10, 2)):
            up_and_down(slow, took)
        result["init_on_alloc_1"] = {"rounds": max(rounds // 10, 2), "median_ms": {way: medians(of) for way, of in took.items()}}
        result["init_on_alloc_0"] = {"median_ms": {way: value["total"]["median"] / 1e3 for way, value in result["stages"].items()}}
    if picture:
        draw(result, picture)
    return result


def draw(result: dict, file: str) -> None:
    import picture as pictures

    figure, (panels,) = pictures.panels(f"512 MiB more or less, {result['rounds']} times from 512 MiB to 2 GiB and back: median, least and most", 2, width=7, height=4)
    for panel, (way, title) in zip(panels, (("add", "Add"), ("remove", "Remove"))):
        of = result["stages"][way]
        lines = [(where, name) for where, names in (("host", HOST[way]), ("guest", GUEST[way])) for name in names if name in of]
        for at, (where, name) in enumerate(lines):
            low, middle, high = (of[name][what] / 1e3 for what in ("min", "median", "max"))
            panel.barh(at, middle, color=pictures.COLOURS[where == "guest"], label=where)
            panel.plot([low, high], [at, at], color="#222222", linewidth=1, marker="|")
            panel.text(high, at, f"  {middle:.1f}", va="center", fontsize=8)
        panel.set_yticks(range(len(lines)), [name.replace("_", " ") for _, name in lines])
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        panel.set(title=title, xlabel="ms", xlim=(0, 1.15 * max(line["max"] for line in of.values()) / 1e3))
    handles = dict(zip(*reversed(panels[0].get_legend_handles_labels())))
    panels[0].legend(handles.values(), handles.keys(), loc="lower right")
    pictures.save(figure, file)


def medians(took: list) -> float | None:
    return statistics.median(of["total"] for of in took) / 1e3 if took else None


def spreads(took: list) -> dict:
    values = {stage: [of[stage] for of in took if stage in of] for stage in {stage for of in took for stage in of}}
    return {stage: {"n": len(of), "min": min(of), "max": max(of), "median": statistics.median(of)} for stage, of in values.items()}


def tell_table(result: dict) -> None:
    print(f"{'us':<8}{'stage':<22}{'min':>10}{'max':>10}{'median':>10}{'n':>6}")
    for way, of in result["stages"].items():
        for where, names in (("host", HOST[way]), ("guest", GUEST[way])):
            for name in names:
                if name in of:
                    line = of[name]
                    print(f"{way:<8}{where + ': ' + name:<22}".ljust(36) + f"{line['min']:10.0f}{line['max']:10.0f}{line['median']:10.0f}{line['n']:6}")
    print(f"{result['rounds']} rounds: {result['short']} steps short; errors in the guest's kernel: {len(result['errors'])}; the host's memory: "
          f"{result['host_before'] / MIB:.1f} MiB before, {result['host_after'] / MIB:.1f} MiB after ({100 * result['host_change']:+.2f} %; wanted: within 2)")
    busy = result["busy"]
    print(f"{busy['rounds']} rounds with a program that checks 200 MiB: {busy['wrong']} of {busy['pages_checked']} pages wrong, {busy['short']} steps short, "
          f"{len(busy['errors'])} errors; add {busy['median_ms']['add']:.0f} ms, remove {busy['median_ms']['remove']:.0f} ms")
    for setting in ("init_on_alloc_0", "init_on_alloc_1"):
        of = result[setting]["median_ms"]
        print(f"{setting}: add {of['add']:.0f} ms, remove {of['remove']:.0f} ms")


KINDS = {"+512M": (512, 1024), "-512M": (1024, 512), "+1.5G": (512, 2048), "-1.5G": (2048, 512)}


def by_hand(monitor, guest, kind: str, sure: int | None) -> dict:
    """Bare virtio-mem; with `sure`, until the guest's MemTotal is so many KiB."""
    grown = (KINDS[kind][1] - 512) * MIB
    began = time.perf_counter()
    monitor("qom-set", path=GROWTH, property="requested-size", value=grown)
    while monitor("qom-get", path=GROWTH, property="size") != grown:
        time.sleep(0.001)
    replied = time.perf_counter()
    while sure is not None and int(guest("total")[0]) != sure:
        time.sleep(0.001)
    return {"ms": (time.perf_counter() - began) * 1e3, "reply_ms": (replied - began) * 1e3}


def by_us(guest, kind: str) -> dict:
    began = time.perf_counter()
    resized = guest.resize(f"{KINDS[kind][1]}M")
    command = (time.perf_counter() - began) * 1e3
    if resized["missing"] or resized["usable"] is False:
        return {"short": resized}
    return {"ms": resized["total_ms"], "reply_ms": stages(resized)["request_reply"] / 1e3, "command_ms": command,
            "usable": resized["usable"], "stages": stages(resized)}


def beside(rounds: int, _picture) -> dict:
    """Each round has each way grow and shrink by each step, in an order by chance."""
    ways = ["ours", "bare", "bare, sure"]
    runs = {kind: {way: [] for way in ways} for kind in KINDS}
    with Host() as host:
        guest = host.guest("beside", "512M", "2G")
        monitor = Monitor(guest)
        totals = {512: int(guest("total")[0])}
        for size in (1024, 2048):
            guest.resize(f"{size}M")
            totals[size] = int(guest("total")[0])
        guest.resize("512M")
        totals[512] = int(guest("total")[0])
        for _ in range(rounds):
            pairs = [(way, pair) for way in ways for pair in (("+512M", "-512M"), ("+1.5G", "-1.5G"))]
            for way, pair in random.sample(pairs, len(pairs)):
                for kind in pair:
                    time.sleep(0.3)
                    size = KINDS[kind][1]
                    took = by_us(guest, kind) if way == "ours" else by_hand(monitor, guest, kind, totals[size] if way == "bare, sure" else None)
                    runs[kind][way].append(took)
                    print(f"{kind} {way:<11}{took.get('ms', -1):8.1f} ms", file=sys.stderr, flush=True)
        errors = guest.errors()
    return {"runs": runs, "ratios": ratios(runs), "errors": errors}


def ratios(runs: dict) -> dict:
    """By kind of step and over all: ours beside each of the others, as a ratio of medians (over all: geometric mean), with the middle 95 % of a bootstrap."""
    def middle(kinds, ours, other, draw):
        values = [statistics.median(draw(of_ours[kind])) / statistics.median(draw(of_other[kind])) for kind in kinds
                  for of_ours, of_other in ((ours, other),)]
        return statistics.geometric_mean(values)

    result = {}
    for name, kinds in ({kind: [kind] for kind in KINDS} | {"all": list(KINDS)}).items():
        result[name] = {}
        for what, way, figure in (("usable / bare", "bare", "ms"), ("usable / bare, sure", "bare, sure", "ms"), ("reply / bare", "bare", "reply_ms")):
            ours = {kind: [took[figure] for took in runs[kind]["ours"] if "ms" in took] for kind in kinds}
            other = {kind: [took[figure] for took in runs[kind][way]] for kind in kinds}
            drawn = sorted(middle(kinds, ours, other, lambda of: random.choices(of, k=len(of))) for _ in range(1000))
            result[name][what] = [middle(kinds, ours, other, lambda of: of), drawn[25], drawn[974]]
    return result


def tell_beside(result: dict) -> None:
    print(f"{'step':<8}{'way':<14}{'median ms':>10}{'quartiles':>18}{'reply ms':>10}{'n':>5}")
    for kind, of in result["runs"].items():
        for way, runs in of.items():
            took = [run["ms"] for run in runs if "ms" in run]
            low, _, high = statistics.quantiles(took * (1 + (len(took) == 1)), n=4)
            print(f"{kind:<8}{way:<14}{statistics.median(took):10.1f}{f'{low:.1f} to {high:.1f}':>18}"
                  f"{statistics.median(run['reply_ms'] for run in runs if 'ms' in run):10.1f}{len(took):5}")
    print("\nours beside bare virtio-mem: ratio of medians (95 % of a bootstrap); wanted: at most 1.1")
    for name, of in result["ratios"].items():
        print(f"{name:<8}" + "; ".join(f"{what} {ratio:.3f} ({low:.3f} to {high:.3f})" for what, (ratio, low, high) in of.items()))
    print(f"errors in the guest's kernel: {len(result['errors'])}")


PARTS = {"table": (table, tell_table, 40), "beside": (beside, tell_beside, 20), "balance": (balancing.measured, balancing.tell, 3),
         "pool": (pooling.measured, pooling.tell, 1)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("part", choices=PARTS)
    arguments.add_argument("--rounds", type=int)
    arguments.add_argument("--picture", metavar="FILE.png", help="of balance and table")
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    measure, tell, rounds = PARTS[given.part]
    try:
        result = measure(given.rounds or rounds, given.picture)
    except KeyboardInterrupt:
        sys.exit(130)
    if given.json:
        print(json.dumps(result))
    else:
        tell(result)


if __name__ == "__main__":
    main()
