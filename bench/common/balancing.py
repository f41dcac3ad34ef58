"""lab/resize balance: two guests whose memory is needed first by one, then by the other."""

import json
import statistics
import sys
import time

from resizing import AQUIFER, Host

MIB = 1 << 20
BOOT, MAX, HALF, BUDGET = "384M", "1408M", "896M", "1792M"
LOAD, TIMES, SWAP, PERIOD = 1024, 1, 1024, 0.5
# What a guest has had more than it needs for five periods is taken from it, and what it has grown by it keeps for ten: so long between the loads.
IDLE, BETWEEN = 8, 18
RATES = {"64 MiB/s": 64, "as fast as it can": 0}
WAYS = {"halves": "each has its half", "balance": "aquifer vm balance"}


def samples(guest, since: float) -> list:
    """(seconds, has, used, swapped, swapped in, swapped out), in bytes."""
    found = []
    for when, line in list(guest.lines):
        if line.startswith("sample ") and len(words := line.split()) == 7:
            total, available, swapped, swap_in, swap_out = map(int, words[2:])
            found.append((when - since, total << 10, (total - available) << 10, swapped << 10, swap_in << 12, swap_out << 12))
    return found


def swapped(guest) -> tuple:
    """Bytes that the guest has read from and written to its swap since it has booted."""
    counts = dict(line.split() for line in guest("grep pswp /proc/vmstat") if line.startswith("pswp"))
    return int(counts["pswpin"]) << 12, int(counts["pswpout"]) << 12


def once(way: str, rate: int) -> dict:
    with Host() as host:
        host.aquifer("vm", "budget", BUDGET)
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
        if way == "balance":
            said = (host.dir / "balance").open("w")
            host.start([AQUIFER, "--json", "--run-dir", host.run_dir, "vm", "balance"], said)
        time.sleep(IDLE)
        loads = []
        for number, guest in enumerate(guests):
            before, start = swapped(guest), time.monotonic() - began
            line = next(line for line in guest(f"load {LOAD} {rate} {TIMES}", 400) if line.startswith("load "))
            first, filled, read = map(float, line.split()[1:])
            after = swapped(guest)
            loads.append({"guest": guest.name, "start": start, "end": time.monotonic() - began, "seconds": read - first, "fill_s": filled - first,
                          "read_s": read - filled, "swap_in": after[0] - before[0], "swap_out": after[1] - before[1]})
            time.sleep(BETWEEN if number == 0 else 3)
        lines = (host.dir / "balance").read_text().splitlines() if way == "balance" else []
        return {"way": way, "rate": rate, "loads": loads, "samples": {guest.name: samples(guest, began) for guest in guests},
                "errors": [line for guest in guests for line in guest.errors()],
                "balance": [json.loads(line) for line in lines if line.endswith("}")]}


def measured(rounds: int, picture: str | None) -> dict:
    runs = []
    for _ in range(rounds):
        for name, rate in RATES.items():
            for way in WAYS:
                run = once(way, rate)
                runs.append(run)
                for load in run["loads"]:
                    print(f"{way:<8} {name:<18} {load['guest']}: {load['seconds']:6.1f} s, swap in {load['swap_in'] / MIB:6.1f} MiB, "
                          f"out {load['swap_out'] / MIB:6.1f} MiB", file=sys.stderr, flush=True)
    if picture:
        draw(runs, picture)
    return {"runs": runs}


def tell(result: dict) -> None:
    print(f"{'load':<20}{'way':<10}{'guest':<7}{'seconds, median':>16}{'least':>7}{'most':>7}{'swap in MiB':>13}{'out MiB, most':>15}{'n':>4}")
    for name, rate in RATES.items():
        for way in WAYS:
            for guest in ("one", "two"):
                loads = [load for run in result["runs"] if (run["way"], run["rate"]) == (way, rate) for load in run["loads"] if load["guest"] == guest]
                seconds = [load["seconds"] for load in loads]
                print(f"{name:<20}{way:<10}{guest:<7}{statistics.median(seconds):16.1f}{min(seconds):7.1f}{max(seconds):7.1f}"
                      f"{max(load['swap_in'] for load in loads) / MIB:13.1f}{max(load['swap_out'] for load in loads) / MIB:15.1f}{len(loads):4}")


def draw(runs: list, file: str) -> None:
    import picture as pictures

    has, used, swap = pictures.COLOURS[0], pictures.COLOURS[2], pictures.COLOURS[4]
    rate = next(iter(RATES.values()))
    figure, axes = pictures.panels(f"Two guests share {BUDGET[:-1]} MiB; one needs {LOAD} MiB, then the other does", 2, 2, width=6.2, height=3.4)
    top = max(sample[1] for run in runs for of in run["samples"].values() for sample in of) / MIB * 1.15
    for column, (way, title) in enumerate(WAYS.items()):
        run = next(run for run in reversed(runs) if (run["way"], run["rate"]) == (way, rate))
        for row, (name, of) in enumerate(run["samples"].items()):
            panel = axes[row][column]
            load = next(load for load in run["loads"] if load["guest"] == name)
            seconds = [sample[0] for sample in of]
            panel.axvspan(load["start"], load["end"], color="#eeeeee", label="its program runs")
            panel.fill_between(seconds, [sample[2] / MIB for sample in of], color=used, alpha=0.6, linewidth=0, label="uses")
            panel.fill_between(seconds, [sample[2] / MIB for sample in of], [(sample[2] + sample[3]) / MIB for sample in of], color=swap, linewidth=0,
                               label="has swapped out")
            panel.plot(seconds, [sample[1] / MIB for sample in of], color=has, linewidth=2, drawstyle="steps-post", label="has")
            panel.set(title=f"{title}: guest {name}", ylim=(0, top), ylabel="MiB")
            moved = (load["swap_in"] + load["swap_out"]) / MIB
            panel.text((load["start"] + load["end"]) / 2, top * 0.99, f"{load['seconds']:.1f} s\n{moved:.0f} MiB swapped", ha="center", va="top", fontsize=9,
                       color=swap if moved else "#222222")
            if row == 1:
                panel.set_xlabel("seconds")
    axes[0][0].legend(loc="upper right", fontsize=9)
    pictures.save(figure, file)
