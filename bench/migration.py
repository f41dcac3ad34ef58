#!/usr/bin/python3 -B
"""Measures `aquifer vm migrate` beside QEMU's own pre-copy ([Jo20] section 5.4, Fig. 7).

From the paper: total time, data and downtime with 30, 50, 70 and 100 % of the footprint in the
local cache, against QEMU's pre-copy of the same guest. Ours: two hosts on one machine, each a
network namespace with an agent, joined by a veth pair without a rate limit. The lender is a process
that both reach by a Unix socket. With --link-rate, both hosts and the lender each have a link of
that rate to a router. The lender has a namespace of its own then, and serves over TLS.

The emulated guest checks and rewrites its memory all the time (`crates/demo/examples/churn.rs`). A
workload is the MiB that it has, the percentage of them that nine of ten writes go to, and the MiB
that it writes a second. The footprint is the memory that QEMU's pre-copy does not find zero. Each
VM runs for some seconds, and then moves to and fro by one mode after the other, so that later modes
find clean what earlier ones wrote back.

Our `bytes` are all that is sent to the other host or written to the pool for the migration; QEMU's
are those it reports as transferred. The script counts the pages that the guest finds wrong, and
with ours there must be none. (QEMU 7.2's own pre-copy sometimes loses writes of emulated guests.)
Targets at 30 %: at least 70 % shorter, 65 % fewer bytes, downtime not longer; at the others:
shorter. Build first:
    cargo build --release --workspace --lib --bins --examples

Usage: bench/migration.py [--rounds N | --moves N] [--link-rate MBIT] [--qemu PROGRAM]
    [--picture FILE.png] [--json]      (as root, on an otherwise idle machine)
"""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from common import bench
from common.bench import AQUIFER, EXAMPLES, ROOT, TESTBED, Failed, end, note, run, wait
from common.qmp import Monitor

HOSTS = {"a": "10.0.0.1", "b": "10.0.0.2"}
LENDER = "10.0.0.3"
WORKLOADS = {"calm": "200 20 2", "hot set": "200 20 20", "uniform": "200 100 40"}
SHARES = [30, 50, 70, 100]
MODES = ("instant", "precopy", "postcopy")
FIGURES = ("total_ms", "bytes", "downtime_ms")
MIB = 512
BUSY = 5.0


class Hosts:
    """Two hosts and a lender, all of which end with `close`."""

    def __init__(self, rate: int | None, qemu: str):
        self.dir = Path(tempfile.mkdtemp(prefix="aquifer-migrate-"))
        self.ram = Path(tempfile.mkdtemp(prefix="aquifer-migrate-", dir="/dev/shm"))
        self.processes: list = []
        self.spaces: dict = {}
        self.qemu = qemu
        try:
            self.boot(rate)
        except BaseException:
            self.close()
            raise

    def boot(self, rate: int | None) -> None:
        for host in HOSTS:
            self.add_namespace(host)
        addresses = HOSTS | {"lender": LENDER}
        names = [
            word for host, address in addresses.items()
            for word in ("--host", host, "--address", address)
        ]
        run(AQUIFER, "cluster", "init", "--dir", self.dir, *names)
        export = [AQUIFER, "serve", "export", "--size", f"{MIB}M"]
        export += ["--dir", self.ram / "pages", "--nbd"]
        if rate:
            self.add_links(rate)
            tls = ["--tls", self.dir / "lender/tls"]
            serve = [*self.on("lender"), *export, f"{LENDER}:10809", *tls]
            self.start(serve, self.dir / "lending")
            self.lender = [
                f"nbds://{LENDER}/", "--lender-host", "lender", "--tls", self.dir / "a/tls",
            ]
            probe = [*self.on("a"), "bash", "-c", f"echo >/dev/tcp/{LENDER}/10809"]
            serves = lambda: subprocess.run(probe, capture_output=True).returncode == 0
            wait("the lender", serves)
        else:
            run("ip", "link", "add", "eth0", "netns", self.spaces["a"], "type", "veth", "peer",
                "name", "eth0", "netns", self.spaces["b"])
            for host, address in HOSTS.items():
                self.set_up(self.spaces[host], "eth0", f"{address}/24")
            path = self.dir / "lender.sock"
            self.start([*export, f"unix:{path}"], self.dir / "lending")
            self.lender = [f"nbd+unix:///?socket={path}"]
            wait("the lender", path.exists)
        for host in HOSTS:
            self.start_agent(host)
        for host in HOSTS:
            answers = lambda: self.command(host, "status").returncode == 0
            wait("the agents", answers)
        churn = ["--file", f"{EXAMPLES}/churn:/bin/churn"]
        script = ["--file", f"{ROOT}/testbed/tests/guests/churn.sh:/bin/churn.sh"]
        parts = run(TESTBED, "parts", *churn, *script, self.dir)
        self.kernel, self.initrd, self.append = parts.splitlines()

    def start_agent(self, host: str) -> None:
        address, peer = HOSTS[host], "b" if host == "a" else "a"
        config = self.dir / host / "agent.toml"
        config.write_text(f'''host = "{host}"
listen = "{address}:7070"
pages = "{address}:7071"
tls = "{self.dir}/{host}/tls"
socket = "{self.dir}/{host}/run/agent.sock"
state = "{self.dir}/{host}/run"
store = "{self.ram}/{host}"
[vms]
accept = true
qemu = "{self.qemu}"
[lend]
enabled = false
[borrow]
enabled = false
[[peer]]
name = "{peer}"
address = "{HOSTS[peer]}:7070"
''')
        command = [*self.on(host), AQUIFER, "serve", "agent", "--config", config]
        self.start(command, self.dir / host / "run")

    def add_namespace(self, name: str) -> None:
        space = f"aquifer-bench-{os.getpid()}-{name}"
        run("ip", "netns", "add", space)
        self.spaces[name] = space

    def add_links(self, rate: int) -> None:
        """Links each host and the lender to a router, at `rate` Mbit/s each way."""
        for name in ("lender", "router"):
            self.add_namespace(name)
        router = self.spaces["router"]
        run("ip", "netns", "exec", router, "sysctl", "-q", "net.ipv4.ip_forward=1")
        for host, address in (HOSTS | {"lender": LENDER}).items():
            space, device = self.spaces[host], f"to-{host}"
            run("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer",
                "name", device, "netns", router)
            self.set_up(space, "eth0", f"{address}/32")
            self.set_up(router, device, "10.0.0.254/32")
            run("ip", "-n", space, "route", "add", "10.0.0.254", "dev", "eth0")
            run("ip", "-n", space, "route", "add", "10.0.0.0/24", "via", "10.0.0.254")
            run("ip", "-n", router, "route", "add", address, "dev", device)
            for inside, near in ((space, "eth0"), (router, device)):
                run("tc", "-n", inside, "qdisc", "add", "dev", near, "root", "tbf",
                    "rate", f"{rate}mbit", "burst", "256k", "latency", "50ms")

    def set_up(self, space: str, device: str, address: str) -> None:
        run("ip", "-n", space, "address", "add", address, "dev", device)
        for name in ("lo", device):
            run("ip", "-n", space, "link", "set", name, "up")

    def on(self, host: str) -> list:
        return ["nsenter", f"--net=/run/netns/{self.spaces[host]}"]

    def start(self, words: list, run_dir: Path) -> subprocess.Popen:
        log = (self.dir / "log").open("a")
        process = subprocess.Popen(
            list(map(str, words)), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True, env=os.environ | {"AQUIFER_RUN_DIR": str(run_dir)},
        )
        self.processes.append(process)
        return process

    def command(self, host: str, *words) -> subprocess.CompletedProcess:
        """Runs an `aquifer` command on a host, which may fail."""
        env = os.environ | {"AQUIFER_RUN_DIR": str(self.dir / host / "run")}
        command = [*self.on(host), AQUIFER, "--json", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, env=env)

    def aquifer(self, host: str, *words):
        done = self.command(host, *words)
        if done.returncode != 0:
            command = f"aquifer {' '.join(map(str, words))}"
            raise Failed(f"{host}: '{command}' failed: {done.stderr.strip()}")
        return json.loads(done.stdout or "{}")

    def start_vm(self, churn: str, cache: int) -> None:
        self.aquifer(
            "a", "vm", "start", "vm", "--memory", f"{MIB}M", "--cache", cache,
            "--lender", *self.lender, "--accel", "tcg", "--qemu", self.qemu,
            "--kernel", self.kernel, "--initrd", self.initrd,
            "--append", self.command_line(churn),
        )

    def consoles(self) -> dict:
        return {host: self.dir / host / "run/vms/vm/console.log" for host in HOSTS}

    def command_line(self, churn: str) -> str:
        """Returns the kernel's command line."""
        return f"{self.append} rdinit=/bin/churn.sh -- {churn}"

    def close(self) -> None:
        for host in self.spaces.keys() & HOSTS.keys():
            done = self.command(host, "vm", "list")
            for vm in json.loads(done.stdout or "[]") if done.returncode == 0 else []:
                self.command(host, "vm", "stop", "--force", vm["name"])
        for process in self.processes:
            end(process)
        for space in self.spaces.values():
            subprocess.run(["ip", "netns", "delete", space], check=False)
        shutil.rmtree(self.dir, ignore_errors=True)
        shutil.rmtree(self.ram, ignore_errors=True)


def progress(console: Path) -> tuple:
    """Returns the ticks, pages rewritten and wrong pages that the guest reported last."""
    try:
        lines = console.read_text(errors="replace").splitlines()[:-1]
        reports = [line.split() for line in lines if line.startswith("churn ")]
        return tuple(map(int, reports[-1][1:4]))
    except (OSError, IndexError, ValueError):
        return (0, 0, 0)


def keep_busy(console: Path, seconds: float) -> int:
    """Waits until the guest has run for so long by its own clock. Returns its wrong pages."""
    wait("the guest's first report", lambda: progress(console)[0] > 0)
    first = progress(console)[0]
    wait("the guest's progress", lambda: progress(console)[0] >= first + seconds * 10)
    return progress(console)[2]


class Qemu:
    """QEMU without Aquifer, controlled over QMP."""

    def __init__(self, hosts: Hosts, host: str, churn: str, more: list):
        self.console, self.path = hosts.dir / f"{host}.console", hosts.dir / f"{host}.qmp"
        for old in (self.console, self.path):
            old.unlink(missing_ok=True)
        self.process = hosts.start([
            *hosts.on(host), hosts.qemu, "-nodefaults", "-no-user-config", "-display", "none",
            "-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-m", f"{MIB}M",
            "-kernel", hosts.kernel, "-initrd", hosts.initrd,
            "-append", hosts.command_line(churn), "-serial", f"file:{self.console}",
            "-qmp", f"unix:{self.path},server=on,wait=off", *more,
        ], hosts.dir)
        wait("QEMU", self.path.exists)
        self.monitor = Monitor(self.path)

    def __call__(self, command: str, **arguments):
        return self.monitor(command, **arguments)


def baseline(hosts: Hosts, churn: str) -> dict:
    """Migrates by QEMU's own pre-copy."""
    there = Qemu(hosts, "b", churn, ["-incoming", f"tcp:{HOSTS['b']}:7080"])
    here = Qemu(hosts, "a", churn, [])
    try:
        keep_busy(here.console, BUSY)
        for qemu in (here, there):
            limits = {"max-bandwidth": 1 << 40, "downtime-limit": 300}
            qemu("migrate-set-parameters", **limits)
        here("migrate", uri=f"tcp:{HOSTS['b']}:7080")
        ended = lambda: here("query-migrate")["status"] in ("completed", "failed")
        wait("QEMU's migration", ended, 300)
        time.sleep(0.1)
        result = here("query-migrate")
        if result["status"] != "completed":
            raise Failed(f"QEMU's migration: {result}")
        wrong = keep_busy(there.console, 2)
        ram = result["ram"]
        return {
            "total_ms": result["total-time"], "downtime_ms": result["downtime"],
            "bytes": ram["transferred"], "wrong": wrong,
            "footprint": ram["total"] - ram["duplicate"] * ram["page-size"],
        }
    finally:
        end(here.process)
        end(there.process)


def ours(hosts: Hosts, churn: str, cache: int) -> dict:
    """Migrates there, back and there again, each time by another mode."""
    hosts.start_vm(churn, cache)
    console = hosts.consoles()
    results, wrong = {}, keep_busy(console["a"], BUSY)
    ways = (("instant", "a", "b"), ("precopy", "b", "a"), ("postcopy", "a", "b"))
    for mode, here, there in ways:
        moved = hosts.command(
            here, "vm", "migrate", "vm", "--to", there, "--mode", mode, "--no-postcopy"
        )
        if moved.returncode != 0:
            results[mode] = {"failed": json.loads(moved.stderr)["error"]["why"]}
            there = here
        else:
            moved = json.loads(moved.stdout)
            parts = (moved[f"bytes_{part}"] for part in ("pages", "metadata", "pool"))
            results[mode] = moved | {"bytes": sum(parts)}
        wrong += keep_busy(console[there], BUSY)
        if there == here:
            break
    hosts.aquifer(there, "vm", "stop", "vm", "--force")
    return results | {"wrong": wrong}


def to_and_fro(hosts: Hosts, churn: str, cache: int, moves: int) -> dict:
    """Migrates one VM again and again, by all modes. Checks its clock and what it leaves behind."""
    hosts.start_vm(churn, cache)
    console = hosts.consoles()
    here, there, wrong, lines = "a", "b", keep_busy(console["a"], BUSY), []
    began = time.monotonic(), progress(console["a"])[0]
    for number in range(moves):
        mode = ("instant", "instant", "postcopy", "precopy")[number % 4]
        moved = hosts.aquifer(
            here, "vm", "migrate", "vm", "--to", there, "--mode", mode, "--max-downtime", "1s"
        )
        lines.append(moved)
        wrong = keep_busy(console[there], 1.5)
        here, there = there, here
        note(
            f"move {number + 1}: {mode:8} {moved['total_ms']:6.0f} ms, paused "
            f"{moved['downtime_ms']:5.1f} ms, {wrong} pages wrong so far"
        )
    ticks = progress(console[here])[0] - began[1]
    paused = sum(line["downtime_ms"] for line in lines) / 1000
    # The guest ticks ten times a second while it runs. Differences below 10 are not significant.
    due = (time.monotonic() - began[0] - paused) * 10
    hosts.aquifer(here, "vm", "stop", "vm", "--force")
    left = [
        host for host in HOSTS
        if hosts.aquifer(host, "vm", "list") or hosts.aquifer(host, "region", "list")
    ]
    pattern = f"serve (vm|region).* {hosts.dir}|qemu.*{hosts.dir}"
    processes = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True).stdout
    files = [file for file in (hosts.ram / "pages").rglob("*") if file.is_file()]
    return {
        "moves": len(lines), "wrong": wrong, "left_on": left,
        "processes_left": len(processes.split()),
        "lender_bytes_left": sum(file.stat().st_blocks * 512 for file in files),
        "ticks": ticks, "ticks_due": round(due, 1),
        "total_ms": bench.spread(line["total_ms"] for line in lines),
        "downtime_ms": bench.spread(line["downtime_ms"] for line in lines),
    }


def measure(rounds: int, rate: int | None, qemu: str) -> dict:
    result: dict = {}
    hosts = Hosts(rate, qemu)
    try:
        for _ in range(rounds):
            for name, churn in WORKLOADS.items():
                none: dict = {"qemu": [], **{str(share): [] for share in SHARES}}
                lines = result.setdefault(name, none)
                line = baseline(hosts, churn)
                lines["qemu"].append(line)
                tell(name, "QEMU", line)
                for share in SHARES:
                    cache = max(line["footprint"] * share // 100, 32 << 20)
                    moved = ours(hosts, churn, cache)
                    lines[str(share)].append(moved | {"cache": cache})
                    for mode in MODES:
                        of = moved.get(mode, {"failed": "not tried"})
                        tell(name, f"{share} % {mode}", of | {"wrong": moved["wrong"]})
    finally:
        hosts.close()
    return result


def tell(workload: str, way: str, of: dict) -> None:
    if "failed" in of:
        text = of["failed"]
    else:
        text = (
            f"{of['total_ms']:8.0f} ms, paused {of['downtime_ms']:6.1f} ms, "
            f"{of['bytes'] / 1e6:7.1f} MB, {of['wrong']} wrong"
        )
    note(f"{workload:10} {way:16} {text}")


def summary(result: dict) -> dict:
    """By workload, share and mode: medians of our figures and QEMU's, and spreads of ratios."""
    lines: dict = {}
    for name, of in result.items():
        for share in map(str, SHARES):
            for mode in MODES:
                pairs = [
                    (line[mode], qemu) for line, qemu in zip(of[share], of["qemu"])
                    if "total_ms" in line.get(mode, {})
                ]
                if not pairs:
                    continue
                line: dict = {"wrong": sum(line["wrong"] for line in of[share]), "ratios": {}}
                for key in FIGURES:
                    line[key] = statistics.median(mine[key] for mine, _ in pairs)
                    line[f"qemu_{key}"] = statistics.median(qemu[key] for _, qemu in pairs)
                    ratios = (mine[key] / max(qemu[key], 1e-9) for mine, qemu in pairs)
                    line["ratios"][key] = bench.spread(ratios)
                lines.setdefault(name, {}).setdefault(share, {})[mode] = line
    return lines


def draw(lines: dict, file: str) -> None:
    from common import picture

    title = "A VM moves: QEMU's own pre-copy is 1"
    figure, axes = picture.panels(title, 3, 2, width=5.2, height=3.6)
    titles = (("total_ms", "total time"), ("bytes", "bytes sent, to the host or the pool"))
    for row, (key, title) in enumerate(titles):
        for panel, workload in zip(axes[row], WORKLOADS):
            bars = {}
            for mode, colour in zip(MODES, picture.COLOURS):
                of = lambda share: lines.get(workload, {}).get(str(share), {}).get(mode)
                values = [
                    of(share)["ratios"][key]["median"] if of(share) else 0 for share in SHARES
                ]
                bars[mode] = (values, colour, "")
            picture.grouped(panel, [f"{share} %" for share in SHARES], bars)
            panel.axhline(1, color="#444444", linewidth=1)
            panel.set_title(f"{workload}: {title}", fontsize=10)
            panel.set_xlabel("of the footprint in the local cache")
    axes[0][0].legend()
    picture.save(figure, file)


def report(result: dict) -> None:
    for workload, shares in result["lines"].items():
        for share, modes in shares.items():
            for mode, line in modes.items():
                ratios = ", ".join(
                    f"{key} {bench.spread_text(of)}" for key, of in line["ratios"].items()
                )
                print(
                    f"{workload:10} {share:>3} % {mode:8} {line['total_ms']:6.0f} ms "
                    f"(QEMU {line['qemu_total_ms']:.0f}): {ratios}; {line['wrong']} wrong"
                )


def report_moves(result: dict) -> None:
    for key, value in result.items():
        spread = isinstance(value, dict)
        print(f"{key.replace('_', ' ')}: {bench.spread_text(value, 1) if spread else value}")


def main() -> None:
    parser = bench.arguments(__doc__, rounds=1, picture=True)
    parser.add_argument("--link-rate", type=int, metavar="MBIT", help="links of so many Mbit/s")
    parser.add_argument(
        "--moves", type=int, metavar="N",
        help="move one VM of the uniform workload N times, with 80 MiB local",
    )
    parser.add_argument(
        "--qemu", default="qemu-system-x86_64", metavar="PROGRAM",
        help="both hosts' QEMU (bench/common/install-qemu10 unpacks QEMU 10)",
    )
    given = bench.parse(parser)
    if given.moves:
        hosts = Hosts(given.link_rate, given.qemu)
        try:
            moved = to_and_fro(hosts, WORKLOADS["uniform"], 80 << 20, given.moves)
        finally:
            hosts.close()
        bench.finish(moved, report_moves)
        return
    runs = measure(given.rounds, given.link_rate, given.qemu)
    lines = summary(runs)
    if given.picture:
        draw(lines, given.picture)
    bench.finish({"lines": lines, "runs": runs}, report)


if __name__ == "__main__":
    bench.start(main)
