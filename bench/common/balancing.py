"""`resize.py balance`: two guests under one budget; one needs memory first, then the other."""

import json
import statistics
import time

from common.bench import MIB, note
from common.resizing import Guest, Host

BOOT, MAX, HALF, BUDGET = "384M", "1408M", "896M", "1792M"
LOAD, TIMES, SWAP, PERIOD = 1024, 1, 1024, 0.5
# The balancer takes memory that a guest has not needed for five periods. A guest keeps for ten
# periods what it was given. The pauses around the loads allow for both.
IDLE, BETWEEN = 8, 18
RATES = {"64 MiB/s": 64, "as fast as it can": 0}
WAYS = {"halves": "each has its half", "balance": "aquifer serve vm-balancer"}


def samples(guest: Guest, since: float) -> list:
    """Returns the guest's samples: seconds, and bytes by what they are."""
    found = []
    for when, line in list(guest.lines):
        if line.startswith("sample ") and len(words := line.split()) == 7:
            total, available, swapped, swap_in, swap_out = map(int, words[2:])
            found.append({
                "seconds": when - since, "has": total << 10, "uses": (total - available) << 10,
                "swapped": swapped << 10, "swap_in": swap_in << 12, "swap_out": swap_out << 12,
            })
    return found


def swapped(guest: Guest) -> tuple:
    """Returns the bytes that the guest has read from and written to its swap since boot."""
    lines = guest("grep pswp /proc/vmstat")
    counts = dict(line.split() for line in lines if line.startswith("pswp"))
    return int(counts["pswpin"]) << 12, int(counts["pswpout"]) << 12


def run_load(guest: Guest, rate: int, began: float) -> dict:
    before, start = swapped(guest), time.monotonic() - began
    lines = guest(f"load {LOAD} {rate} {TIMES}", 400)
    line = next(line for line in lines if line.startswith("load "))
    first, filled, read = map(float, line.split()[1:])
    after = swapped(guest)
    return {
        "start": start, "end": time.monotonic() - began, "seconds": read - first,
        "fill_s": filled - first, "read_s": read - filled,
        "swap_in": after[0] - before[0], "swap_out": after[1] - before[1],
    }


def once(way: str, rate: int) -> dict:
    with Host() as host:
        host.aquifer("vm", "set-budget", "--memory", BUDGET)
        guests = []
        for name in ("one", "two"):
            disk = host.ram / name
            with disk.open("wb") as file:
                file.truncate(SWAP * MIB)
            guests.append(host.guest(name, BOOT, MAX, "--disk", disk))
        for guest in guests:
            guest("swap; pattern")
            guest.resize(HALF)
        began = time.monotonic()
        for guest in guests:
            guest(f"samples {PERIOD} &")
        log = host.dir / "balance"
        if way == "balance":
            host.start_aquifer("serve", "vm-balancer", output=log.open("w"))
        time.sleep(IDLE)
        loads = {}
        for number, guest in enumerate(guests):
            loads[guest.name] = run_load(guest, rate, began)
            time.sleep(BETWEEN if number == 0 else 3)
        lines = log.read_text().splitlines() if way == "balance" else []
        return {
            "loads": loads,
            "samples": {guest.name: samples(guest, began) for guest in guests},
            "errors": [line for guest in guests for line in guest.errors()],
            "balance": [json.loads(line) for line in lines if line.endswith("}")],
        }


def measure(rounds: int, picture: str | None) -> dict:
    """Returns {rate: {way: [a run of each round]}}."""
    runs: dict = {name: {way: [] for way in WAYS} for name in RATES}
    for _ in range(rounds):
        for name, rate in RATES.items():
            for way in WAYS:
                run = once(way, rate)
                runs[name][way].append(run)
                for guest, load in run["loads"].items():
                    swap_in, swap_out = load["swap_in"] / MIB, load["swap_out"] / MIB
                    note(
                        f"{way:<8} {name:<18} {guest}: {load['seconds']:6.1f} s, "
                        f"swap in {swap_in:6.1f} MiB, out {swap_out:6.1f} MiB"
                    )
    if picture:
        draw(runs, picture)
    return runs


def report(runs: dict) -> None:
    print(
        f"{'load':<20}{'way':<10}{'guest':<7}{'seconds, median':>16}{'least':>7}{'most':>7}"
        f"{'swap in MiB':>13}{'out MiB, most':>15}{'n':>4}"
    )
    for name, ways in runs.items():
        for way, of in ways.items():
            for guest in ("one", "two"):
                loads = [run["loads"][guest] for run in of]
                seconds = [load["seconds"] for load in loads]
                swap_in, swap_out = (
                    max(load[key] for load in loads) / MIB for key in ("swap_in", "swap_out")
                )
                print(
                    f"{name:<20}{way:<10}{guest:<7}{statistics.median(seconds):16.1f}"
                    f"{min(seconds):7.1f}{max(seconds):7.1f}{swap_in:13.1f}{swap_out:15.1f}"
                    f"{len(loads):4}"
                )


def draw(runs: dict, file: str) -> None:
    from common import picture

    has, used, swap = (picture.COLOURS[at] for at in (0, 2, 4))
    title = f"Two guests share {BUDGET[:-1]} MiB; one needs {LOAD} MiB, then the other does"
    figure, axes = picture.panels(title, 2, 2, width=6.2, height=3.4)
    ways = next(iter(runs.values()))
    all_samples = [
        sample for of in ways.values() for run in of for one in run["samples"].values()
        for sample in one
    ]
    top = max(sample["has"] for sample in all_samples) / MIB * 1.15
    for column, (way, title) in enumerate(WAYS.items()):
        run = ways[way][-1]
        for row, (name, of) in enumerate(run["samples"].items()):
            panel, load = axes[row][column], run["loads"][name]
            seconds = [sample["seconds"] for sample in of]
            uses = [sample["uses"] / MIB for sample in of]
            with_swap = [(sample["uses"] + sample["swapped"]) / MIB for sample in of]
            panel.axvspan(load["start"], load["end"], color="#eeeeee", label="its program runs")
            panel.fill_between(seconds, uses, color=used, alpha=0.6, linewidth=0, label="uses")
            panel.fill_between(
                seconds, uses, with_swap, color=swap, linewidth=0, label="has swapped out"
            )
            panel.plot(
                seconds, [sample["has"] / MIB for sample in of], color=has, linewidth=2,
                drawstyle="steps-post", label="has",
            )
            panel.set(title=f"{title}: guest {name}", ylim=(0, top), ylabel="MiB")
            moved = (load["swap_in"] + load["swap_out"]) / MIB
            panel.text(
                (load["start"] + load["end"]) / 2, top * 0.99,
                f"{load['seconds']:.1f} s\n{moved:.0f} MiB swapped", ha="center", va="top",
                fontsize=9, color=swap if moved else "#222222",
            )
            if row == 1:
                panel.set_xlabel("seconds")
    axes[0][0].legend(loc="upper right", fontsize=9)
    picture.save(figure, file)
