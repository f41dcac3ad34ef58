#!/usr/bin/python3 -B
"""A VM that moves between two hosts by `aquifer vm migrate`, beside QEMU's own pre-copy of the same guest (Migration, section 5.4, Fig. 7).

From the paper: total time, data and downtime with 30, 50, 70 and 100 % of the footprint in the local cache, against QEMU's pre-copy without it. Ours: two
hosts on one machine, each a network namespace with an agent, joined by a veth pair without a limit; the lender is a process that both reach by a unix
socket. With --link-rate both hosts and the lender, which then has a namespace of its own and serves by TLS, each have a link of that rate to a router.
The guest, emulated, checks and rewrites its memory all the time (`crates/cli/examples/churn.rs`): three workloads, by MiB that
it has, percent of them that nine of ten writes go to, and MiB a second. The footprint is what QEMU's pre-copy finds not to be zero. Each VM is
busy for a few seconds, then moves to and fro by one mode after the other (so the later ones find what the first have written back clean). `bytes` of ours is all that is sent to the other host or written to the pool for
the move; of QEMU's, what it says it has transferred. Pages that the guest finds wrong are counted, by workload, and none may be with ours. (QEMU 7.2's own
pre-copy loses writes of emulated guests now and then; that is not ours.)
Wanted, at 30 %: at least 70 % shorter, 65 % fewer bytes, downtime not longer; at the others still shorter.

Build first: cargo build --release --workspace --lib --bins --examples

Usage: lab/migrate [--rounds N | --moves N] [--link-rate MBIT] [--qemu PROGRAM] [--picture FILE.png] [--json]      (as root, on a machine that does nothing else)
"""

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT = Path(os.environ.get("AQUIFER_BUILT", ROOT / "target/release"))
AQUIFER = BUILT / "aquifer"
HOSTS = {"a": "10.0.0.1", "b": "10.0.0.2"}
LENDER = "10.0.0.3"
WORKLOADS = {"calm": "200 20 2", "hot set": "200 20 20", "uniform": "200 100 40"}
SHARES = [30, 50, 70, 100]
MODES = ("instant", "precopy", "postcopy")
MIB = 512
BUSY = 5.0


class Hosts:
    """Two hosts and a lender; all of it ends with `close`."""

    def __init__(self, rate: int | None, qemu: str):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        self.dir = Path(tempfile.mkdtemp(prefix="aquifer-migrate-"))
        self.ram = Path(tempfile.mkdtemp(prefix="aquifer-migrate-", dir="/dev/shm"))
        self.processes: list = []
        self.qemu = qemu
        self.spaces = {host: f"aquifer-lab-{os.getpid()}-{host}" for host in HOSTS}
        for space in self.spaces.values():
            run("ip", "netns", "add", space)
        run(AQUIFER, "init", "--dir", self.dir, *(word for host, address in (HOSTS | {"lender": LENDER}).items() for word in ("--host", host, "--address", address)))
        export = [AQUIFER, "export", f"{MIB}M", "--dir", self.ram / "pages", "--nbd"]
        if rate:
            self.links(rate)
            self.start([*self.on("lender"), *export, f"{LENDER}:10809", "--tls", self.dir / "lender/tls"], self.dir / "lending")
            self.lender = [f"nbds://{LENDER}/", "--lender-host", "lender", "--tls", self.dir / "a/tls"]
            wait("the lender", lambda: subprocess.run([*self.on("a"), "bash", "-c", f"echo >/dev/tcp/{LENDER}/10809"], capture_output=True).returncode == 0)
        else:
            run("ip", "link", "add", "eth0", "netns", self.spaces["a"], "type", "veth", "peer", "name", "eth0", "netns", self.spaces["b"])
            for host, address in HOSTS.items():
                self.up(self.spaces[host], "eth0", f"{address}/24")
            path = self.dir / "lender.sock"
            self.start([*export, f"unix:{path}"], self.dir / "lending")
            self.lender = [f"nbd+unix:///?socket={path}"]
            wait("the lender", path.exists)
        for host, address in HOSTS.items():
            peer = "b" if host == "a" else "a"
            (self.dir / host / "agent.toml").write_text(f'''host = "{host}"
listen = "{address}:7070"
pages = "{address}:7071"
tls = "{self.dir}/{host}/tls"
socket = "{self.dir}/{host}/run/agent.sock"
state = "{self.dir}/{host}/run"
store = "{self.ram}/{host}"
[vms]
accept = true
qemu = "{qemu}"
[lend]
enabled = false
[borrow]
enabled = false
[[peer]]
name = "{peer}"
address = "{HOSTS[peer]}:7070"
''')
            self.start([*self.on(host), AQUIFER, "agent", "--config", self.dir / host / "agent.toml"], self.dir / host / "run")
        for host in HOSTS:
            wait("the agents", lambda: self.asked(host, "status").returncode == 0)
        kernel = subprocess.run([BUILT / "testbed", "parts", "--file", f"{BUILT}/examples/churn:/bin/churn", "--file",
                                 f"{ROOT}/testbed/tests/guests/churn.sh:/bin/churn.sh", self.dir], capture_output=True, text=True, check=True)
        self.kernel, self.initrd, self.append = kernel.stdout.splitlines()

    def links(self, rate: int) -> None:
        """A link of so many MBit/s, each way, from each host and the lender to a router."""
        for space in ("lender", "router"):
            self.spaces[space] = f"aquifer-lab-{os.getpid()}-{space}"
            run("ip", "netns", "add", self.spaces[space])
        router = self.spaces["router"]
        run("ip", "netns", "exec", router, "sysctl", "-q", "net.ipv4.ip_forward=1")
        for host, address in (HOSTS | {"lender": LENDER}).items():
            space, device = self.spaces[host], f"to-{host}"
            run("ip", "link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", device, "netns", router)
            self.up(space, "eth0", f"{address}/32")
            self.up(router, device, "10.0.0.254/32")
            run("ip", "-n", space, "route", "add", "10.0.0.254", "dev", "eth0")
            run("ip", "-n", space, "route", "add", "10.0.0.0/24", "via", "10.0.0.254")
            run("ip", "-n", router, "route", "add", address, "dev", device)
            for inside, end in ((space, "eth0"), (router, device)):
                run("tc", "-n", inside, "qdisc", "add", "dev", end, "root", "tbf", "rate", f"{rate}mbit", "burst", "256k", "latency", "50ms")

    def up(self, space: str, device: str, address: str) -> None:
        for words in (["address", "add", address, "dev", device], ["link", "set", "lo", "up"], ["link", "set", device, "up"]):
            run("ip", "-n", space, *words)

    def on(self, host: str) -> list:
        return ["nsenter", f"--net=/run/netns/{self.spaces[host]}"]

    def start(self, words: list, run_dir: Path):
        log = (self.dir / "log").open("a")
        process = subprocess.Popen(list(map(str, words)), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                                   env=os.environ | {"AQUIFER_RUN_DIR": str(run_dir)})
        self.processes.append(process)
        return process

    def asked(self, host: str, *words: str):
        env = os.environ | {"AQUIFER_RUN_DIR": str(self.dir / host / "run")}
        return subprocess.run([*self.on(host), AQUIFER, "--json", *map(str, words)], capture_output=True, text=True, env=env)

    def aquifer(self, host: str, *words: str) -> dict:
        done = self.asked(host, *words)
        if done.returncode != 0:
            raise SystemExit(f"{sys.argv[0]}: {host}: aquifer {' '.join(map(str, words))}: {done.stderr.strip()}")
        return json.loads(done.stdout or "{}")

    def boot(self, churn: str) -> str:
        return f"{self.append} rdinit=/bin/churn.sh -- {churn}"

    def close(self) -> None:
        for host in HOSTS:
            done = self.asked(host, "vm", "list")
            for vm in json.loads(done.stdout or "[]") if done.returncode == 0 else []:
                self.asked(host, "vm", "stop", "--force", vm["name"])
        for process in self.processes:
            process.kill()
            process.wait()
        for space in self.spaces.values():
            subprocess.run(["ip", "netns", "delete", space], check=False)
        shutil.rmtree(self.dir, ignore_errors=True)
        shutil.rmtree(self.ram, ignore_errors=True)


def run(*words) -> None:
    subprocess.run(list(map(str, words)), check=True, stdout=subprocess.DEVNULL)


def wait(what: str, condition, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"{sys.argv[0]}: {what}: not within {timeout} s")
        time.sleep(0.02)


def said(console: Path) -> tuple:
    """Ticks, pages rewritten and pages wrong, as the guest has said last."""
    try:
        lines = [line.split() for line in console.read_text(errors="replace").splitlines()[:-1] if line.startswith("churn ")]
        return tuple(map(int, lines[-1][1:4]))
    except (OSError, IndexError, ValueError):
        return (0, 0, 0)


def is_busy(console: Path, seconds: float) -> int:
    """Waits until the guest has gone on for so long by its own account; pages wrong by then."""
    wait("the guest", lambda: said(console)[0] > 0)
    first = said(console)[0]
    wait("the guest", lambda: said(console)[0] >= first + seconds * 10)
    return said(console)[2]


class Qemu:
    """QEMU without Aquifer, which speaks QMP."""

    def __init__(self, hosts: Hosts, host: str, churn: str, more: list):
        self.console, self.path = hosts.dir / f"{host}.console", hosts.dir / f"{host}.qmp"
        for old in (self.console, self.path):
            old.unlink(missing_ok=True)
        self.process = hosts.start([*hosts.on(host), hosts.qemu, "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35",
                                    "-accel", "tcg,thread=multi", "-cpu", "max", "-m", f"{MIB}M", "-kernel", hosts.kernel, "-initrd", hosts.initrd,
                                    "-append", hosts.boot(churn), "-serial", f"file:{self.console}", "-qmp", f"unix:{self.path},server=on,wait=off",
                                    *more], hosts.dir)
        wait("QEMU", self.path.exists)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(self.path))
        self.lines = self.socket.makefile()
        self.lines.readline()
        self("qmp_capabilities")

    def __call__(self, command: str, **arguments):
        self.socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode())
        while True:
            answer = json.loads(self.lines.readline())
            if "error" in answer:
                raise SystemExit(f"{sys.argv[0]}: QEMU: {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def baseline(hosts: Hosts, churn: str) -> dict:
    """QEMU's own pre-copy."""
    there = Qemu(hosts, "b", churn, ["-incoming", f"tcp:{HOSTS['b']}:7080"])
    here = Qemu(hosts, "a", churn, [])
    try:
        is_busy(here.console, BUSY)
        for qemu in (here, there):
            qemu("migrate-set-parameters", **{"max-bandwidth": 1 << 40, "downtime-limit": 300})
        here("migrate", uri=f"tcp:{HOSTS['b']}:7080")
        wait("QEMU's migration", lambda: here("query-migrate")["status"] in ("completed", "failed"), 300)
        time.sleep(0.1)
        result = here("query-migrate")
        if result["status"] != "completed":
            raise SystemExit(f"{sys.argv[0]}: QEMU's migration: {result}")
        wrong = is_busy(there.console, 2)
        ram = result["ram"]
        return {"total_ms": result["total-time"], "downtime_ms": result["downtime"], "bytes": ram["transferred"], "wrong": wrong,
                "footprint": ram["total"] - ram["duplicate"] * ram["page-size"]}
    finally:
        here.end()
        there.end()


def ours(hosts: Hosts, churn: str, cache: int) -> dict:
    """There, back and there again, each by another mode."""
    words = ["vm", "start", "vm", "--memory", f"{MIB}M", "--cache", cache, "--lender", *hosts.lender, "--accel", "tcg", "--qemu", hosts.qemu,
             "--kernel", hosts.kernel, "--initrd", hosts.initrd, "--append", hosts.boot(churn)]
    hosts.aquifer("a", *words)
    console = {host: hosts.dir / host / "run/vms/vm/console.log" for host in HOSTS}
    results, wrong = {}, is_busy(console["a"], BUSY)
    for mode, here, there in (("instant", "a", "b"), ("precopy", "b", "a"), ("postcopy", "a", "b")):
        moved = hosts.asked(here, "vm", "migrate", "vm", "--to", there, "--mode", mode, "--no-postcopy")
        if moved.returncode != 0:
            results[mode] = {"failed": json.loads(moved.stderr)["error"]["why"]}
            there = here
        else:
            moved = json.loads(moved.stdout)
            results[mode] = moved | {"bytes": moved["bytes_pages"] + moved["bytes_metadata"] + moved["bytes_pool"]}
        wrong += is_busy(console[there], BUSY)
        if there == here:
            break
    hosts.aquifer(there, "vm", "stop", "vm", "--force")
    return results | {"wrong": wrong}


def to_and_fro(hosts: Hosts, churn: str, cache: int, moves: int) -> dict:
    """One VM that moves again and again, by all modes; what is left of it at the end on either host and with the lender, and whether its clock went on."""
    words = ["vm", "start", "vm", "--memory", f"{MIB}M", "--cache", cache, "--lender", *hosts.lender, "--accel", "tcg", "--qemu", hosts.qemu,
             "--kernel", hosts.kernel, "--initrd", hosts.initrd, "--append", hosts.boot(churn)]
    hosts.aquifer("a", *words)
    console = {host: hosts.dir / host / "run/vms/vm/console.log" for host in HOSTS}
    here, there, wrong, lines = "a", "b", is_busy(console["a"], BUSY), []
    began = time.monotonic(), said(console["a"])[0]
    for number in range(moves):
        mode = ("instant", "instant", "postcopy", "precopy")[number % 4]
        moved = hosts.aquifer(here, "vm", "migrate", "vm", "--to", there, "--mode", mode, "--max-downtime", "1s")
        lines.append(moved)
        wrong = is_busy(console[there], 1.5)
        here, there = there, here
        print(f"move {number + 1}: {mode:8} {moved['total_ms']:6.0f} ms, still {moved['downtime_ms']:5.1f} ms, {wrong} pages wrong so far", file=sys.stderr, flush=True)
    ticks = said(console[here])[0] - began[1]
    due = (time.monotonic() - began[0] - sum(line["downtime_ms"] for line in lines) / 1000) * 10
    hosts.aquifer(here, "vm", "stop", "vm", "--force")
    left = [host for host in HOSTS if hosts.aquifer(host, "vm", "list") or hosts.aquifer(host, "region", "list")]
    processes = subprocess.run(["pgrep", "-f", f"(vm|region)-serve {hosts.dir}|qemu.*{hosts.dir}"], capture_output=True, text=True).stdout.split()
    return {"moves": len(lines), "wrong": wrong, "left_on": left, "processes_left": len(processes),
            "lender_bytes_left": sum(file.stat().st_blocks * 512 for file in (hosts.ram / "pages").rglob("*") if file.is_file()),
            # Ten a second but for when it stood still; what is less than a second is the measurement's.
            "ticks": ticks, "ticks_due": round(due, 1),
            "total_ms": [statistics.median(line["total_ms"] for line in lines), max(line["total_ms"] for line in lines)],
            "downtime_ms": [statistics.median(line["downtime_ms"] for line in lines), max(line["downtime_ms"] for line in lines)]}


def measured(rounds: int, rate: int | None, qemu: str) -> dict:
    result: dict = {}
    hosts = Hosts(rate, qemu)
    try:
        for number in range(rounds):
            for name, churn in WORKLOADS.items():
                lines = result.setdefault(name, {"qemu": [], **{str(share): [] for share in SHARES}})
                line = baseline(hosts, churn)
                lines["qemu"].append(line)
                tell(name, "QEMU", line)
                for share in SHARES:
                    cache = max(line["footprint"] * share // 100, 32 << 20)
                    line_of_ours = ours(hosts, churn, cache)
                    lines[str(share)].append(line_of_ours | {"cache": cache})
                    for mode in MODES:
                        tell(name, f"{share} % {mode}", line_of_ours.get(mode, {"failed": "not tried"}) | {"wrong": line_of_ours["wrong"]})
    finally:
        hosts.close()
    return result


def tell(*words) -> None:
    what = words[-1]
    if "failed" in what:
        text = what["failed"]
    else:
        text = f"{what['total_ms']:8.0f} ms, still {what['downtime_ms']:6.1f} ms, {what['bytes'] / 1e6:7.1f} MB, {what['wrong']} wrong"
    print(f"{words[0]:10} {words[1]:16} {text}", file=sys.stderr, flush=True)


def summary(result: dict) -> list:
    """A line for each workload, share and mode: each figure beside QEMU's, by the median of rounds."""
    lines = []
    for name, of in result.items():
        for share in SHARES:
            for mode in MODES:
                good = [(line[mode], qemu) for line, qemu in zip(of[str(share)], of["qemu"]) if "total_ms" in line.get(mode, {})]
                if not good:
                    continue
                ratio = {what: [mine[what] / max(theirs[what], 1e-9) for mine, theirs in good] for what in ("total_ms", "bytes", "downtime_ms")}
                lines.append({"workload": name, "share": share, "mode": mode, "rounds": len(good),
                              "total_ms": statistics.median(mine["total_ms"] for mine, _ in good),
                              "qemu_total_ms": statistics.median(theirs["total_ms"] for _, theirs in good),
                              "downtime_ms": statistics.median(mine["downtime_ms"] for mine, _ in good),
                              "qemu_downtime_ms": statistics.median(theirs["downtime_ms"] for _, theirs in good),
                              "ratios": {what: [statistics.median(all), min(all), max(all)] for what, all in ratio.items()},
                              "wrong": sum(line["wrong"] for line in of[str(share)])})
    return lines


def picture(lines: list, file: str) -> None:
    import picture as pictures
    figure, axes = pictures.panels("A VM moves: QEMU's own pre-copy is 1", 3, 2, width=5.2, height=3.6)
    for row, (what, title) in enumerate((("total_ms", "total time"), ("bytes", "bytes sent, to the host or the pool"))):
        for panel, workload in zip(axes[row], WORKLOADS):
            bars = {}
            for mode, colour in zip(MODES, pictures.COLOURS):
                values = [next((line["ratios"][what][0] for line in lines if (line["workload"], line["share"], line["mode"]) == (workload, share, mode)), 0)
                          for share in SHARES]
                bars[mode] = (values, colour, "")
            pictures.grouped(panel, [f"{share} %" for share in SHARES], bars)
            panel.axhline(1, color="#444444", linewidth=1)
            panel.set_title(f"{workload}: {title}", fontsize=10)
            panel.set_xlabel("of the footprint in the local cache")
    axes[0][0].legend()
    pictures.save(figure, file)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--link-rate", type=int, metavar="MBIT")
    arguments.add_argument("--picture", metavar="FILE.png")
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("--moves", type=int, help="one VM of the uniform workload, 30 %% of it local, that moves so often")
    arguments.add_argument("--qemu", default="qemu-system-x86_64", metavar="PROGRAM", help="both hosts' QEMU (lab/qemu10 gets another)")
    given = arguments.parse_args()
    if given.moves:
        hosts = Hosts(given.link_rate, given.qemu)
        try:
            print(json.dumps(to_and_fro(hosts, WORKLOADS["uniform"], 80 << 20, given.moves)))
        finally:
            hosts.close()
        return
    result = measured(given.rounds, given.link_rate, given.qemu)
    lines = summary(result)
    if given.picture:
        picture(lines, given.picture)
    if given.json:
        print(json.dumps({"lines": lines, "runs": result}))
        return
    for line in lines:
        text = ", ".join(f"{what} {median:.2f} ({low:.2f} to {high:.2f})" for what, (median, low, high) in line["ratios"].items())
        print(f"{line['workload']:10} {line['share']:3} % {line['mode']:8} {line['total_ms']:6.0f} ms (QEMU {line['qemu_total_ms']:.0f}): {text}; {line['wrong']} wrong")


if __name__ == "__main__":
    main()
