"""`resize.py pool`: a host with little RAM to spare, whose VM grows by a lender's memory."""

import time
from pathlib import Path

from common.bench import AQUIFER, MIB, wait
from common.resizing import Guest, Host

BOOT, MAX, CACHE, FILL = "512M", "1536M", "256M", 1152


class Watched:
    """The places of the VM's memory: by the engine's report, and by the size of the lender's file.
    It also keeps the most that was on this host."""

    def __init__(self, host: Host, export: Path):
        self.host, self.export, self.most = host, export, 0

    def __call__(self) -> dict:
        usage = self.host.aquifer("vm", "show", "pool")["region"]["usage"]
        self.most = max(self.most, usage["resident"])
        files = [file for file in self.export.rglob("*") if file.is_file()]
        lent = sum(file.stat().st_blocks * 512 for file in files)
        return {key: usage[key] for key in ("resident", "cache", "remote")} | {"lent": lent}


def churned(guest: Guest) -> list:
    """Returns the last complete line that the program in the guest has printed, in words."""
    return guest("tail -n 2 /run/churn | head -n 1")[0].split()


def once() -> dict:
    with Host() as host:
        socket, export = host.dir / "lender.sock", host.ram / "pages"
        lending = [AQUIFER, "--run-dir", host.dir / "lending", "serve", "export", "--size", "2G"]
        host.start([*lending, "--nbd", f"unix:{socket}", "--dir", export])
        wait("the lender", socket.exists)
        uri = f"nbd+unix:///?socket={socket}"
        guest = host.guest("pool", BOOT, MAX, "--cache", CACHE, "--lender", uri)
        watched = Watched(host, export)
        steps = {"booted": watched()}
        grown = guest.resize(MAX)
        steps["grown"] = watched()
        guest(f"churn {FILL} 100 20 > /run/churn & echo $! > /run/churn.pid")
        has_begun = lambda: watched() and guest("tail -n 1 /run/churn") != []
        wait("the program's first report", has_begun, 300, 0.5)
        steps["filled"] = watched()
        # Every tenth tick checks one part of 64, so that 660 ticks check all parts.
        wait("a check of all", lambda: watched() and int(churned(guest)[1]) > 660, 500, 0.5)
        _, tick, pages, wrong = churned(guest)
        steps["checked"] = watched()
        guest("kill $(cat /run/churn.pid); echo 3 > /proc/sys/vm/drop_caches")
        shrunk = guest.resize(BOOT, "--retry", "60s")
        time.sleep(5)
        steps["shrunk"] = watched()
        return {
            "grown": grown, "shrunk": shrunk, "pages": int(pages), "wrong": int(wrong),
            "most_here": watched.most, "steps": steps, "errors": guest.errors(),
        }


def measure(rounds: int, _picture: str | None) -> dict:
    return {"runs": [once() for _ in range(rounds)]}


def report(result: dict) -> None:
    for run in result["runs"]:
        for way in ("grown", "shrunk"):
            of = run[way]
            start, reached, missing = (of[key] // MIB for key in ("from", "reached", "missing"))
            print(
                f"{way}: {start} -> {reached} MiB in {of['total_ms']:.0f} ms, "
                f"{missing} MiB missing"
            )
        print(f"{'MiB':<9}{'here':>8}{'of':>8}{'remote':>8}{'with the lender':>17}")
        for step, of in run["steps"].items():
            here, cache, remote = (of[key] / MIB for key in ("resident", "cache", "remote"))
            print(f"{step:<9}{here:8.0f}{cache:8.0f}{remote:8.0f}{of['lent'] / MIB:17.0f}")
        print(
            f"at most {run['most_here'] / MIB:.0f} MiB here; a program of {FILL} MiB: "
            f"{run['wrong']} pages wrong, {run['pages']} rewritten and all read; "
            f"{len(run['errors'])} errors of the guest's kernel"
        )
