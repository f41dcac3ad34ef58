"""lab/resize pool: a host with little to spare, whose VM grows by a lender's memory."""

import time

from resizing import AQUIFER, Host, wait

MIB = 1 << 20
BOOT, MAX, CACHE, FILL = "512M", "1536M", "256M", 1152


class Watched:
    """Where the VM's memory is: what the engine says, and what the lender's file takes; every half second, for the most that was here."""

    def __init__(self, host: Host, export):
        self.host, self.export, self.most = host, export, 0

    def __call__(self) -> dict:
        usage = self.host.aquifer("vm", "show", "pool")["region"]["usage"]
        self.most = max(self.most, usage["resident"])
        lent = sum(file.stat().st_blocks * 512 for file in self.export.rglob("*") if file.is_file())
        return {"resident": usage["resident"], "cache": usage["cache"], "remote": usage["remote"], "lent": lent}


def measured(rounds: int, _picture) -> dict:
    runs = []
    for _ in range(rounds):
        with Host() as host:
            socket, export = host.dir / "lender.sock", host.ram / "pages"
            host.start([AQUIFER, "--run-dir", host.dir / "lending", "export", "2G", "--nbd", f"unix:{socket}", "--dir", export])
            wait("the lender", socket.exists)
            guest = host.guest("pool", BOOT, MAX, "--cache", CACHE, "--lender", f"nbd+unix:///?socket={socket}")
            watched = Watched(host, export)
            steps = {"booted": watched()}
            grown = guest.resize(MAX)
            steps["grown"] = watched()
            guest(f"churn {FILL} 100 20 > /run/churn & echo $! > /run/churn.pid")
            wait("the program", lambda: watched() and guest("tail -n 1 /run/churn") != [], 300, 0.5)
            steps["filled"] = watched()
            # A tick in ten checks a part of 64, one after the other: so long until all was checked.
            wait("all to be checked", lambda: watched() and int(guest("tail -n 2 /run/churn | head -n 1")[0].split()[1]) > 660, 500, 0.5)
            _, tick, pages, wrong = guest("tail -n 2 /run/churn | head -n 1")[0].split()
            steps["checked"] = watched()
            guest("kill $(cat /run/churn.pid); echo 3 > /proc/sys/vm/drop_caches")
            shrunk = guest.resize(BOOT, "--retry", "60s")
            time.sleep(5)
            steps["shrunk"] = watched()
            runs.append({"grown": grown, "shrunk": shrunk, "pages": int(pages), "wrong": int(wrong), "most_here": watched.most, "steps": steps, "errors": guest.errors()})
    return {"runs": runs}


def tell(result: dict) -> None:
    for run in result["runs"]:
        for way in ("grown", "shrunk"):
            print(f"{way}: {run[way]['from'] // MIB} -> {run[way]['reached'] // MIB} MiB in {run[way]['total_ms']:.0f} ms, {run[way]['missing'] // MIB} MiB missing")
        print(f"{'MiB':<9}{'here':>8}{'of':>8}{'remote':>8}{'with the lender':>17}")
        for step, of in run["steps"].items():
            print(f"{step:<9}{of['resident'] / MIB:8.0f}{of['cache'] / MIB:8.0f}{of['remote'] / MIB:8.0f}{of['lent'] / MIB:17.0f}")
        print(f"at most {run['most_here'] / MIB:.0f} MiB here; a program of {FILL} MiB: {run['wrong']} pages wrong, {run['pages']} rewritten and all read; "
              f"{len(run['errors'])} errors of the guest's kernel")
