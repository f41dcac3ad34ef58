#!/usr/bin/python3 -B
"""Measures 4 KiB random I/O on another host's RAM, beside local RAM and a disk ([Ge23] Fig. 11).

Two hosts of the testbed with Debian's kernel 6.12: b lends. In a, fio uses three kinds of device:
the block device that the kernel's NVMe initiator makes of b's memory, a RAM disk of a, and a virtio
disk whose pages are on a disk of this machine. Each round runs every job on every device in turn.
The figures are medians over the rounds. The ratios to the disk are taken within each round. Before
the first round and after the last, fio writes and checks all that it uses of each device.

Emulated processors are slow, and a page that crosses to another host waits for those of both: only
ratios within a run mean something. A device that does not answer in time is named and left out from
then on; with soft-RoCE this happens now and then.

Needs fio, qemu-system-x86 and rdma (iproute2). Build first:
    cargo build --release -p aquifer-cli -p aquifer-testbed --bins

Usage: bench/direct_pages.py [--rounds N] [--seconds S] [--json]
"""

import json
import shutil
import signal
import statistics
import subprocess
import tempfile
from pathlib import Path

from common import bench
from common.bench import AQUIFER, TESTBED, Failed, note

JOBS = [(rw, depth) for rw in ("randread", "randwrite") for depth in (1, 32)]
MODULES = [
    # The modules that soft-RoCE needs, in the order in which it needs them.
    "crc32-pclmul", "crc32_generic", "rdma_rxe", "nvme-tcp", "nvme-rdma", "nvmet-tcp", "nvmet-rdma",
    "virtio_blk", "brd rd_nr=1 rd_size=131072", "zram",
]
DISK = "disk: virtio"
SIZE = "128M"
# The part of each device that fio uses.
USED = "32M"
LENDER = "10.77.0.2"
HOST = "nqn.2014-08.org.nvmexpress:uuid:0a77de51-0000-4000-8000-00000000000a"
SECRET = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:"
# Seconds after which a command on an emulated host counts as hung.
TIMEOUT = 120


class Hung(Exception):
    """A command did not end in time."""


class Hosts:
    """Two hosts, a and b."""

    def __init__(self, work: Path):
        tools = {"fio": "/bin/fio", "rdma": "/bin/rdma"}
        files = [f"{shutil.which(name)}:{there}" for name, there in tools.items()]
        files.append(f"{AQUIFER}:/bin/aquifer")
        self.socket = work / "testbed.sock"
        command = [TESTBED, "up", "--hosts", "2", "--memory", "768MiB", "--disk", SIZE + "iB"]
        command += ["--socket", self.socket]
        command += [word for module in MODULES for word in ("--module", module)]
        command += [word for file in files for word in ("--file", file)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        try:
            if not any("up until" in line for line in self.process.stdout):
                raise Failed("the hosts did not boot")
        except BaseException:
            self.stop()
            raise

    def run(self, host: str, command: str) -> str:
        """Runs a command that must succeed, and in time; returns its output."""
        order = [TESTBED, "exec", "--socket", self.socket, host, command]
        try:
            done = subprocess.run(order, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired as late:
            raise Hung(f"{host}: '{command}' did not end within {TIMEOUT} s") from late
        if done.returncode != 0:
            output = f"{done.stdout}{done.stderr}"
            raise Failed(f"{host}: '{command}' failed ({done.returncode}):\n{output}")
        return done.stdout

    def export(self, at: str, *words: str) -> dict:
        """Makes b lend at an address, and returns the JSON that b prints then."""
        log = f"/tmp/export-{at}"
        command = [
            "aquifer", "serve", "export", "--size", SIZE, "--json", "--nvme", at,
            "--allow-host", HOST, *words,
        ]
        ready = f"until grep -q capacity {log} || ! kill -0 $!; do sleep 0.1; done"
        output = self.run("b", f"{' '.join(command)} >{log} 2>&1 & {ready}; cat {log}; kill -0 $!")
        return json.loads(output)

    def attach(self, uri: str, *words: str) -> str:
        """Attaches b's memory with the kernel of a, and returns the device."""
        command = [
            "aquifer", "volume", "attach", "--direct", "--json", "--io-timeout", "forever",
            "--host-nqn", HOST, *words, uri,
        ]
        return json.loads(self.run("a", " ".join(command)))["device"]

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


def devices(hosts: Hosts) -> dict:
    """Returns, for each device, the function that makes it."""

    def zram() -> str:
        hosts.run("a", f"echo {SIZE} >/sys/block/zram0/disksize")
        return "/dev/zram0"

    def aquifer() -> str:
        # Over a network, our target accepts only hosts that authenticate as they connect.
        for host in "ab":
            hosts.run(host, f"echo {SECRET} >/tmp/secret")
        address = f"{LENDER}:4420"
        lent = hosts.export(address, "--dhchap-secret /tmp/secret")
        uri = f"nvme+tcp://{address}/{lent['nvme']['nqn']}"
        return hosts.attach(uri, "--dhchap-secret /tmp/secret")

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
        "aquifer, TCP": aquifer,
        "nvmet, TCP": tcp,
        "nvmet, RDMA": rdma,
    }


def fio(hosts: Hosts, device: str, *words: str) -> dict:
    """Runs a job of fio in a, and returns fio's report of it."""
    command = [
        "fio", "--name=job", f"--filename={device}", f"--size={USED}", "--ioengine=libaio",
        "--direct=1", "--randrepeat=0", "--output-format=json", *words,
    ]
    output = hosts.run("a", " ".join(command))
    return json.loads(output[output.index("{"):])["jobs"][0]


def check(hosts: Hosts, device: str) -> None:
    """Writes the used part of a device, and checks every block."""
    verify = ["--verify=crc32c", "--verify_fatal=1", "--do_verify=1"]
    fio(hosts, device, "--rw=randwrite", "--bs=16k", "--iodepth=16", *verify)


def measure(hosts: Hosts, device: str, rw: str, depth: int, seconds: float) -> dict:
    """Runs a job once."""
    time = ["--time_based", f"--runtime={seconds}", "--ramp_time=0.5"]
    job = fio(hosts, device, f"--rw={rw}", "--bs=4k", f"--iodepth={depth}", "--norandommap", *time)
    side = job["read" if rw == "randread" else "write"]
    latency = side["clat_ns"]
    percentile = latency["percentile"]
    return {
        "iops": side["iops"],
        "mb_s": side["bw_bytes"] / 1e6,
        "mean_us": latency["mean"] / 1000,
        "p50_us": percentile["50.000000"] / 1000,
        "p99_us": percentile["99.000000"] / 1000,
    }


def run(hosts: Hosts, names: list[str], rounds: int, seconds: float) -> dict:
    """Returns the samples of each device, job and round, and the devices left out, with causes."""
    made, hung = {}, {}
    samples: dict = {name: {f"{rw}-{depth}": [] for rw, depth in JOBS} for name in names}

    def attempt(name: str, action):
        if name in hung:
            return None
        try:
            return action()
        except Hung as why:
            note(f"direct_pages: {name}: {why}")
            hung[name] = str(why)
            return None

    def make(name: str) -> None:
        made[name] = devices(hosts)[name]()
        check(hosts, made[name])
        note(f"{name} is {made[name]}, and checked")

    for name in names:
        attempt(name, lambda: make(name))
    for number in range(rounds):
        # Each round starts with another device.
        order = [names[(at + number) % len(names)] for at in range(len(names))]
        for rw, depth in JOBS:
            for name in order:
                sample = attempt(name, lambda: measure(hosts, made[name], rw, depth, seconds))
                # A missed round keeps its place, for the ratios within a round.
                samples[name][f"{rw}-{depth}"].append(sample)
        note(f"round {number + 1} of {rounds} is done")
    for name in names:
        attempt(name, lambda: check(hosts, made[name]))
    return {"samples": samples, "hung": hung}


def report(result: dict) -> None:
    median = lambda samples, key: statistics.median(sample[key] for sample in samples)
    for rw, depth in JOBS:
        job = f"{rw}-{depth}"
        print(f"{rw}, depth {depth}")
        print(
            f"  {'':14}{'IOPS':>9} {'(lowest-highest)':>18}{'MB/s':>8}{'mean us':>10}{'50 %':>9}"
            f"{'99 %':>9}{'to the disk':>26}"
        )
        for name, jobs in result["samples"].items():
            samples = [sample for sample in jobs[job] if sample]
            if not samples:
                continue
            iops = [sample["iops"] for sample in samples]
            spread = f"({min(iops):,.0f}-{max(iops):,.0f})"
            times = f"{median(samples, 'mean_us'):10,.0f}" + "".join(
                f"{median(samples, key):9,.0f}" for key in ("p50_us", "p99_us")
            )
            pairs = zip(jobs[job], result["samples"][DISK][job])
            ratios = [one["iops"] / disk["iops"] for one, disk in pairs if one and disk]
            ratio = bench.spread_text(bench.spread(ratios)) if ratios else ""
            rates = f"{statistics.median(iops):9,.0f} {spread:>18}{median(samples, 'mb_s'):8.1f}"
            print(f"  {name:14}{rates}{times}{ratio:>26}")
    for name, why in result["hung"].items():
        print(f"{name} was left out from then on: {why}")


def main() -> None:
    parser = bench.arguments(__doc__, rounds=5)
    parser.add_argument("--seconds", type=float, default=2, help="of each run")
    args = bench.parse(parser)
    bench.require("fio", "qemu-system-x86_64", "rdma")
    with tempfile.TemporaryDirectory(prefix="aquifer-bench-") as work:
        hosts = Hosts(Path(work))
        try:
            result = run(hosts, list(devices(hosts)), args.rounds, args.seconds)
        finally:
            hosts.stop()
    bench.finish(result, report)


if __name__ == "__main__":
    bench.start(main)
