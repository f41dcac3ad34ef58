#!/usr/bin/env python3
"""4 KiB random reads and writes on the RAM of another host, beside RAM of the host itself and beside a disk (Sharing, Fig. 11).

Two hosts of the testbed with Debian's kernel 6.12: b lends, and fio in a uses what the kernel's own NVMe initiator makes of that,
a RAM disk of a, and a virtio disk whose pages are on a disk of this machine. Each round runs every job on every device in turn;
figures are medians over the rounds, and the ratios to the disk are taken within each round. Before the first round and after the
last one fio writes and checks all that it uses of each device. Emulated processors are slow, and a page that crosses
to another host waits for those of both: only ratios within a run mean something. What does not answer in time (soft-RoCE now and then does not) is named and left out from then on.

Needs fio, qemu-system-x86 and rdma (iproute2), and
    cargo build --release -p aquifer-cli -p aquifer-testbed --bins

Usage: lab/fabrics [--rounds N] [--seconds S] [--json]
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AQUIFER = os.environ.get("AQUIFER", ROOT / "target/release/aquifer")
TESTBED = os.environ.get("TESTBED", ROOT / "target/release/testbed")
JOBS = [(rw, depth) for rw in ("randread", "randwrite") for depth in (1, 32)]
MODULES = [
    # What soft-RoCE takes, in the order in which it takes it.
    "crc32-pclmul", "crc32_generic", "rdma_rxe", "nvme-tcp", "nvme-rdma", "nvmet-tcp", "nvmet-rdma", "virtio_blk",
    "brd rd_nr=1 rd_size=131072", "zram",
]
DISK = "disk: virtio"
SIZE = "128M"
# Of which fio uses this much.
USED = "32M"
LENDER = "10.77.0.2"
HOST = "nqn.2014-08.org.nvmexpress:uuid:0a77de51-0000-4000-8000-00000000000a"
SECRET = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:"
# Seconds for what takes some on an emulated host; more is a hang.
TIMEOUT = 120


class Hung(Exception):
    """A command did not end in time."""


class Hosts:
    """Two hosts, a and b."""

    def __init__(self, work: Path):
        tools = {"fio": "/bin/fio", "rdma": "/bin/rdma"}
        files = [f"{shutil.which(name)}:{there}" for name, there in tools.items()] + [f"{AQUIFER}:/bin/aquifer"]
        self.socket = work / "testbed.sock"
        command = [TESTBED, "up", "--hosts", "2", "--memory", "768MiB", "--disk", SIZE + "iB", "--socket", self.socket]
        command += [word for module in MODULES for word in ("--module", module)]
        command += [word for file in files for word in ("--file", file)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        if not any("up until" in line for line in self.process.stdout):
            raise SystemExit("lab/fabrics: the hosts do not boot")

    def run(self, host: str, command: str) -> str:
        """What a command prints that must succeed, and in time."""
        order = [TESTBED, "exec", "--socket", self.socket, host, command]
        try:
            done = subprocess.run(order, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired as late:
            raise Hung(f"{host}: '{command}' has not ended after {TIMEOUT} s") from late
        if done.returncode != 0:
            raise SystemExit(f"lab/fabrics: {host}: '{command}' ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def export(self, at: str, *words: str) -> dict:
        """Has b lend at an address, and says what b said when it did."""
        said = f"/tmp/export-{at}"
        command = " ".join(["aquifer", "export", SIZE, "--json", "--nvme", at, "--allow-host", HOST, *words])
        wait = f"until grep -q capacity {said} || ! kill -0 $!; do sleep 0.1; done; cat {said}; kill -0 $!"
        return json.loads(self.run("b", f"{command} >{said} 2>&1 & {wait}"))

    def attach(self, uri: str, *words: str) -> str:
        """Has the kernel of a attach what b lends, and says as what."""
        command = ["aquifer", "attach", "--direct", "--json", "--io-timeout", "forever", "--host-nqn", HOST, *words, uri]
        return json.loads(self.run("a", " ".join(command)))["device"]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def devices(hosts: Hosts) -> dict:
    """How each device is made that is measured."""

    def zram() -> str:
        hosts.run("a", f"echo {SIZE} >/sys/block/zram0/disksize")
        return "/dev/zram0"

    def ours() -> str:
        # Over a network our target takes only hosts that prove who they are, which they do as they connect.
        for host in "ab":
            hosts.run(host, f"echo {SECRET} >/tmp/secret")
        address = f"{LENDER}:4420"
        lent = hosts.export(address, "--dhchap-secret /tmp/secret")
        return hosts.attach(f"nvme+tcp://{address}/{lent['nvme']['nqn']}", "--dhchap-secret /tmp/secret")

    def tcp() -> str:
        [uri] = hosts.export(f"{LENDER}:4421", "--kernel")["uris"]
        return hosts.attach(uri)

    def rdma() -> str:
        for host in "ab":
            hosts.run(host, "rdma link add rxe0 type rxe netdev eth0")
        uris = hosts.export(f"{LENDER}:4422", "--kernel", "--rdma")["uris"]
        return hosts.attach(next(uri for uri in uris if uri.startswith("nvme+rdma:")))

    return {
        DISK: lambda: "/dev/vda",
        "RAM: brd": lambda: "/dev/ram0",
        "RAM: zram": zram,
        "ours, TCP": ours,
        "nvmet, TCP": tcp,
        "nvmet, RDMA": rdma,
    }


def fio(hosts: Hosts, device: str, *words: str) -> dict:
    """What fio in a says of a job of its own."""
    command = [
        "fio", "--name=job", f"--filename={device}", f"--size={USED}", "--ioengine=libaio", "--direct=1",
        "--randrepeat=0", "--output-format=json", *words,
    ]
    said = hosts.run("a", " ".join(command))
    return json.loads(said[said.index("{"):])["jobs"][0]


def check(hosts: Hosts, device: str) -> None:
    """Writes all that is used of a device, and checks every block."""
    fio(hosts, device, "--rw=randwrite", "--bs=16k", "--iodepth=16", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1")


def measure(hosts: Hosts, device: str, rw: str, depth: int, seconds: float) -> dict:
    """One run of a job."""
    time = ["--time_based", f"--runtime={seconds}", "--ramp_time=0.5"]
    job = fio(hosts, device, f"--rw={rw}", "--bs=4k", f"--iodepth={depth}", "--norandommap", *time)
    side = job["read" if rw == "randread" else "write"]
    latency = side["clat_ns"]
    times = {"mean": latency["mean"], "p50": latency["percentile"]["50.000000"], "p99": latency["percentile"]["99.000000"]}
    return {"iops": side["iops"], "mb_s": side["bw_bytes"] / 1e6} | {f"{key}_us": ns / 1000 for key, ns in times.items()}


def run(hosts: Hosts, names: list[str], rounds: int, seconds: float) -> tuple[dict, dict]:
    """The samples of each device, job and round, and what was left out and why."""
    made, hung = {}, {}
    results = {name: {job: [] for job in JOBS} for name in names}

    def attempt(name: str, what):
        if name in hung:
            return None
        try:
            return what()
        except Hung as why:
            print(f"lab/fabrics: {name}: {why}", file=sys.stderr)
            hung[name] = str(why)
            return None

    def make(name: str) -> None:
        made[name] = devices(hosts)[name]()
        check(hosts, made[name])
        print(f"{name} is {made[name]}, and checked", file=sys.stderr)

    for name in names:
        attempt(name, lambda: make(name))
    for number in range(rounds):
        # Nobody always comes first.
        order = [names[(at + number) % len(names)] for at in range(len(names))]
        for rw, depth in JOBS:
            for name in order:
                sample = attempt(name, lambda: measure(hosts, made[name], rw, depth, seconds))
                # A round that was missed keeps its place.
                results[name][rw, depth].append(sample)
        print(f"round {number + 1} of {rounds} is done", file=sys.stderr)
    for name in names:
        attempt(name, lambda: check(hosts, made[name]))
    return results, hung


def report(results: dict, hung: dict) -> None:
    median = lambda samples, key: statistics.median(sample[key] for sample in samples)
    for rw, depth in JOBS:
        print(f"{rw}, depth {depth}")
        print(f"  {'':14}{'IOPS':>9} {'(lowest-highest)':>18}{'MB/s':>8}{'mean us':>10}{'50 %':>9}{'99 %':>9}{'to the disk':>22}")
        for name, jobs in results.items():
            samples = [sample for sample in jobs[rw, depth] if sample]
            if not samples:
                continue
            iops = [sample["iops"] for sample in samples]
            spread = f"({min(iops):,.0f}-{max(iops):,.0f})"
            times = "".join(f"{median(samples, key):{width},.0f}" for key, width in (("mean_us", 10), ("p50_us", 9), ("p99_us", 9)))
            pairs = zip(jobs[rw, depth], results.get(DISK, {}).get((rw, depth), []))
            ratios = [ours["iops"] / disk["iops"] for ours, disk in pairs if ours and disk]
            ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else ""
            print(f"  {name:14}{statistics.median(iops):9,.0f} {spread:>18}{median(samples, 'mb_s'):8.1f}{times}{ratio:>22}")
    for name, why in hung.items():
        print(f"{name} was left out from then on: {why}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object with all samples")
    arguments = parser.parse_args()
    for tool in ("fio", "qemu-system-x86_64", "rdma"):
        if not shutil.which(tool):
            raise SystemExit(f"lab/fabrics: {tool} is missing: apt-get install fio qemu-system-x86 iproute2")
    # However it ends, the hosts are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))

    with tempfile.TemporaryDirectory(prefix="aquifer-lab-") as work:
        hosts = Hosts(Path(work))
        try:
            names = list(devices(hosts))
            results, hung = run(hosts, names, arguments.rounds, arguments.seconds)
        finally:
            hosts.stop()
    if arguments.json:
        samples = {name: {f"{rw}-{depth}": runs for (rw, depth), runs in jobs.items()} for name, jobs in results.items()}
        print(json.dumps({"samples": samples, "hung": hung}))
    else:
        report(results, hung)


if __name__ == "__main__":
    main()
