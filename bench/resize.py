#!/usr/bin/python3 -B
"""Measures how VMs grow and shrink while they run ([Bielski18] Table I), with emulated guests.

`table`: a VM of 512 MiB grows to 2 GiB and shrinks again in steps of 512 MiB. The stages are those
of the paper's Table I, with min, max and median. A second part runs while a program in the guest
checks and rewrites 200 MiB, which have to move. A third part uses `init_on_alloc=1`, Debian's
default, with which the guest's kernel zeroes pages. Targets: no errors of the guest's kernel, no
wrong page, and the host's memory within 2 % of what it was.

`beside`: `aquifer vm resize` beside virtio-mem by hand: `requested-size` set over QMP, then `size`
read each millisecond until they agree. A third way also waits until the guest's MemTotal is as
expected, as a user of the memory must. One VM runs all ways in random order. Target: at most 1.1
times as long.

`balance`: two guests under one budget of 1,792 MiB. First one and then the other needs 1 GiB. Each
has its half, or `aquifer serve vm-balancer` runs. Swap is a disk (a file of this host). Target: no
swap with the balancer.

`pool`: on a host with 256 MiB to spare, a VM grows to 1.5 GiB. The rest goes to a lender, and back.

Build first:
    cargo build --release --workspace --lib --bins --examples

Usage: bench/resize.py table|beside|balance|pool [--rounds N] [--picture FILE.png] [--json]
    (as root, on an otherwise idle machine)
"""

import random
import statistics
import time

from common import balancing, bench, pooling
from common.bench import MIB, note, wait
from common.pooling import churned
from common.qmp import Monitor
from common.resizing import FOR_GROWTH, GROWTH, Guest, Host

UP, DOWN = [1024, 1536, 2048], [1536, 1024, 512]
HOST = {
    "add": ["backend_reservation", "request_reply", "confirmation", "total"],
    "remove": ["request_reply", "backend_release", "total"],
}
GUEST = {
    "add": ["page_table_build", "section_init", "onlining", "guest_subtotal"],
    "remove": [
        "offlining", "section_clean_up", "page_table_destroy", "sub_block_offlining",
        "guest_subtotal",
    ],
}


def stages(resized: dict) -> dict:
    """Returns microseconds by stage. The guest's subtotal excludes waits for the host."""
    took = {stage["stage"]: stage["us"] for stage in resized["stages"]}
    if "guest_total" in took:
        took["guest_subtotal"] = took["guest_total"] - took.get("host_requests", 0)
    return took


def up_and_down(guest: Guest, took: dict) -> int:
    """Grows and shrinks once. Returns the number of steps that stopped short."""
    short = 0
    for way, steps in (("add", UP), ("remove", DOWN)):
        for size in steps:
            resized = guest.resize(f"{size}M", "--stages")
            short += resized["missing"] != 0 or resized["usable"] is False
            if resized["missing"] == 0:
                took[way].append(stages(resized))
    return short


def no_times() -> dict:
    return {"add": [], "remove": []}


def busy_table(guest: Guest, rounds: int) -> dict:
    """Resizes while a program holds memory that has to move."""
    guest.resize("2G")
    guest("churn 200 100 20 > /run/churn & echo $! > /run/churn.pid")
    wait("the program's first report", lambda: guest("tail -n 1 /run/churn") != [])
    guest.resize("512M")
    took = no_times()
    short = sum(up_and_down(guest, took) for _ in range(rounds))
    _, tick, pages, wrong = churned(guest)
    guest("kill $(cat /run/churn.pid)")
    return {
        "rounds": rounds, "short": short, "pages_checked": int(pages), "wrong": int(wrong),
        "errors": guest.errors(), "median_ms": {way: median_ms(of) for way, of in took.items()},
    }


def table(rounds: int, picture: str | None) -> dict:
    result: dict = {"rounds": rounds}
    with Host() as host:
        guest = host.guest("table", "512M", "2G")
        up_and_down(guest, no_times())
        before, took = guest.host_bytes(), no_times()
        short = sum(up_and_down(guest, took) for _ in range(rounds))
        after = guest.host_bytes()
        result |= {
            "stages": {way: spreads(of) for way, of in took.items()}, "short": short,
            "host_before": before, "host_after": after, "host_change": after / before - 1,
            "errors": guest.errors(),
        }
        result["busy"] = busy_table(guest, max(rounds // 4, 1))
        host.stop("table")
        slow = host.guest("zeroes", "512M", "2G", kernel=FOR_GROWTH)
        took, slow_rounds = no_times(), max(rounds // 10, 2)
        up_and_down(slow, no_times())
        for _ in range(slow_rounds):
            up_and_down(slow, took)
        result["init_on_alloc_1"] = {
            "rounds": slow_rounds, "median_ms": {way: median_ms(of) for way, of in took.items()},
        }
        totals = {way: of["total"]["median"] / 1e3 for way, of in result["stages"].items()}
        result["init_on_alloc_0"] = {"median_ms": totals}
    if picture:
        draw(result, picture)
    return result


def lines_of(result: dict, way: str) -> list:
    """Returns (host or guest, stage) of all stages that were measured, in order."""
    places = (("host", HOST[way]), ("guest", GUEST[way]))
    of = result["stages"][way]
    return [(place, name) for place, names in places for name in names if name in of]


def draw(result: dict, file: str) -> None:
    from common import picture

    title = (
        f"512 MiB more or less, {result['rounds']} times from 512 MiB to 2 GiB and back: "
        "median, least and most"
    )
    figure, (panels,) = picture.panels(title, 2, width=7, height=4)
    for panel, (way, title) in zip(panels, (("add", "Add"), ("remove", "Remove"))):
        of, lines = result["stages"][way], lines_of(result, way)
        for at, (place, name) in enumerate(lines):
            low, middle, high = (of[name][key] / 1e3 for key in ("min", "median", "max"))
            panel.barh(at, middle, color=picture.COLOURS[place == "guest"], label=place)
            panel.plot([low, high], [at, at], color="#222222", linewidth=1, marker="|")
            panel.text(high, at, f"  {middle:.1f}", va="center", fontsize=8)
        panel.set_yticks(range(len(lines)), [name.replace("_", " ") for _, name in lines])
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
        right = 1.15 * max(line["max"] for line in of.values()) / 1e3
        panel.set(title=title, xlabel="ms", xlim=(0, right))
    handles = dict(zip(*reversed(panels[0].get_legend_handles_labels())))
    panels[0].legend(handles.values(), handles.keys(), loc="lower right")
    picture.save(figure, file)


def median_ms(took: list) -> float | None:
    return statistics.median(of["total"] for of in took) / 1e3 if took else None


def spreads(took: list) -> dict:
    names = {stage for of in took for stage in of}
    values = {stage: [of[stage] for of in took if stage in of] for stage in names}
    return {
        stage: {"n": len(of), "min": min(of), "max": max(of), "median": statistics.median(of)}
        for stage, of in values.items()
    }


def report_table(result: dict) -> None:
    print(f"{'us':<8}{'stage':<28}{'min':>10}{'max':>10}{'median':>10}{'n':>6}")
    for way, of in result["stages"].items():
        for place, name in lines_of(result, way):
            line = of[name]
            print(
                f"{way:<8}{place + ': ' + name:<28}{line['min']:10.0f}{line['max']:10.0f}"
                f"{line['median']:10.0f}{line['n']:6}"
            )
    before, after = (result[key] / MIB for key in ("host_before", "host_after"))
    print(
        f"{result['rounds']} rounds: {result['short']} steps stopped short; errors of the guest's "
        f"kernel: {len(result['errors'])}; the host's memory: {before:.1f} MiB before, "
        f"{after:.1f} MiB after ({100 * result['host_change']:+.2f} %; target: within 2)"
    )
    busy = result["busy"]
    add, remove = (busy["median_ms"][way] or float("nan") for way in ("add", "remove"))
    print(
        f"{busy['rounds']} rounds with a program that checks 200 MiB: {busy['wrong']} of "
        f"{busy['pages_checked']} pages wrong, {busy['short']} steps stopped short, "
        f"{len(busy['errors'])} errors; add {add:.0f} ms, remove {remove:.0f} ms"
    )
    for setting in ("init_on_alloc_0", "init_on_alloc_1"):
        of = result[setting]["median_ms"]
        add, remove = (of[way] or float("nan") for way in ("add", "remove"))
        print(f"{setting}: add {add:.0f} ms, remove {remove:.0f} ms")


KINDS = {"+512M": (512, 1024), "-512M": (1024, 512), "+1.5G": (512, 2048), "-1.5G": (2048, 512)}
WAYS = ("aquifer", "by hand", "by hand, sure")
# Ratio: the way that is compared with, and the figure.
COMPARED = {
    "usable / by hand": ("by hand", "ms"),
    "usable / by hand, sure": ("by hand, sure", "ms"),
    "reply / by hand": ("by hand", "reply_ms"),
}


def by_hand(monitor: Monitor, guest: Guest, kind: str, sure: int | None) -> dict:
    """Uses bare virtio-mem. With `sure`, also waits until the guest's MemTotal is so many KiB."""
    grown = (KINDS[kind][1] - 512) * MIB
    began = time.perf_counter()
    monitor("qom-set", path=GROWTH, property="requested-size", value=grown)
    while monitor("qom-get", path=GROWTH, property="size") != grown:
        time.sleep(0.001)
    replied = time.perf_counter()
    while sure is not None and int(guest("total")[0]) != sure:
        time.sleep(0.001)
    return {"ms": (time.perf_counter() - began) * 1e3, "reply_ms": (replied - began) * 1e3}


def by_aquifer(guest: Guest, kind: str) -> dict:
    began = time.perf_counter()
    resized = guest.resize(f"{KINDS[kind][1]}M")
    command = (time.perf_counter() - began) * 1e3
    if resized["missing"] or resized["usable"] is False:
        return {"short": resized}
    took = stages(resized)
    return {
        "ms": resized["total_ms"], "reply_ms": took["request_reply"] / 1e3, "command_ms": command,
        "usable": resized["usable"], "stages": took,
    }


def beside(rounds: int, _picture: str | None) -> dict:
    """In each round, every way grows and shrinks by each step, in random order."""
    runs: dict = {kind: {way: [] for way in WAYS} for kind in KINDS}
    with Host() as host:
        guest = host.guest("beside", "512M", "2G")
        monitor = Monitor(guest.files / "qmp")
        totals = {512: int(guest("total")[0])}
        for size in (1024, 2048, 512):
            guest.resize(f"{size}M")
            totals[size] = int(guest("total")[0])
        for _ in range(rounds):
            steps = (("+512M", "-512M"), ("+1.5G", "-1.5G"))
            pairs = [(way, pair) for way in WAYS for pair in steps]
            for way, pair in random.sample(pairs, len(pairs)):
                for kind in pair:
                    time.sleep(0.3)
                    sure = totals[KINDS[kind][1]] if way == "by hand, sure" else None
                    if way == "aquifer":
                        took = by_aquifer(guest, kind)
                    else:
                        took = by_hand(monitor, guest, kind, sure)
                    runs[kind][way].append(took)
                    note(f"{kind} {way:<14}{took.get('ms', -1):8.1f} ms")
        errors = guest.errors()
    return {"runs": runs, "ratios": ratios(runs), "errors": errors}


def ratios(runs: dict) -> dict:
    """By kind of step and over all: the ratio of our median to that of another way, with the middle
    95 % of a bootstrap. The ratio over all is the geometric mean."""

    def ratio(kinds: list, ours: dict, other: dict, draw) -> float:
        medians = [
            statistics.median(draw(ours[kind])) / statistics.median(draw(other[kind]))
            for kind in kinds
        ]
        return statistics.geometric_mean(medians)

    result: dict = {}
    for name, kinds in ({kind: [kind] for kind in KINDS} | {"all": list(KINDS)}).items():
        result[name] = {}
        for text, (way, figure) in COMPARED.items():
            times = lambda kind, way: [one[figure] for one in runs[kind][way] if "ms" in one]
            ours = {kind: times(kind, "aquifer") for kind in kinds}
            other = {kind: times(kind, way) for kind in kinds}
            redraw = lambda of: random.choices(of, k=len(of))
            drawn = sorted(ratio(kinds, ours, other, redraw) for _ in range(1000))
            result[name][text] = {
                "ratio": ratio(kinds, ours, other, lambda of: of),
                "low": drawn[25], "high": drawn[974],
            }
    return result


def report_beside(result: dict) -> None:
    print(f"{'step':<8}{'way':<16}{'median ms':>10}{'quartiles':>18}{'reply ms':>10}{'n':>5}")
    for kind, of in result["runs"].items():
        for way, runs in of.items():
            took = [run["ms"] for run in runs if "ms" in run]
            low, _, high = statistics.quantiles(took * (1 + (len(took) == 1)), n=4)
            reply = statistics.median(run["reply_ms"] for run in runs if "ms" in run)
            print(
                f"{kind:<8}{way:<16}{statistics.median(took):10.1f}"
                f"{f'{low:.1f} to {high:.1f}':>18}{reply:10.1f}{len(took):5}"
            )
    print("\naquifer beside bare virtio-mem: ratio of medians (95 % of a bootstrap)")
    print("target: at most 1.1")
    for name, of in result["ratios"].items():
        texts = (
            f"{text} {one['ratio']:.3f} ({one['low']:.3f} to {one['high']:.3f})"
            for text, one in of.items()
        )
        print(f"{name:<8}" + "; ".join(texts))
    print(f"errors of the guest's kernel: {len(result['errors'])}")


# Part: what measures it, what reports it, and rounds.
PARTS = {
    "table": (table, report_table, 40),
    "beside": (beside, report_beside, 20),
    "balance": (balancing.measure, balancing.report, 3),
    "pool": (pooling.measure, pooling.report, 1),
}


def main() -> None:
    parser = bench.arguments(__doc__, rounds=None, picture=True)
    parser.add_argument("part", choices=PARTS, help="only table and balance draw a picture")
    given = bench.parse(parser)
    measure, report, rounds = PARTS[given.part]
    bench.finish(measure(given.rounds or rounds, given.picture), report)


if __name__ == "__main__":
    bench.start(main)
