"""Guests on this host, alone or as VMs of groups, for page_sharing.py and consolidation.py."""

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from common.bench import AQUIFER, COMMON, MIB, PAGE, aquifer, boot_parts, cpu_seconds, run, wait

KSM = Path("/sys/kernel/mm/ksm")
MEMORY = 256
# The line of a guest whose memory is filled.
FILLED = b"its memory is full"
LOCAL = ["--cache", f"{MEMORY + 64}M", "--emulate-link", "1us"]
# What the guests do in each phase of `rates`, and their cache in MiB.
PHASES = {
    "idle": ("idle", MEMORY + 64),
    "busy": ("busy", MEMORY + 64),
    "busy, short of memory": ("walk", 24),
}
RATE_FIELDS = (
    "scan_pages_per_ms", "saved_bytes", "scanner_cpu_pct", "scanned", "merged", "why",
)


def cpu(processes: list, thread: str | None = None) -> float:
    """Returns the CPU seconds of these processes, or of their threads with that name."""
    total = 0.0
    for pid in processes:
        tasks = [Path(f"/proc/{pid}")]
        if thread is not None:
            tasks = list(Path(f"/proc/{pid}/task").glob("*"))
        for task in tasks:
            try:
                if thread is None or (task / "comm").read_text().strip() == thread:
                    total += cpu_seconds(task / "stat")
            except (OSError, IndexError):
                pass
    return total


def until_settled(saved, used, timeout: float = 180) -> tuple:
    """Waits until `saved` has not grown by 1 % for 3 s. Returns the seconds, and the CPU seconds,
    until 99 % of the final value was saved."""
    began = best_at = time.monotonic()
    best, samples = 0, []
    while time.monotonic() - best_at < 3 or best == 0:
        now = saved()
        samples.append((now, time.monotonic() - began, used()))
        if now > best * 1.01 + 16 * PAGE:
            best, best_at = now, time.monotonic()
        if time.monotonic() - began > timeout:
            break
        time.sleep(0.05)
    nearly = 0.99 * samples[-1][0]
    _, seconds, cpu_used = next(sample for sample in samples if sample[0] >= nearly)
    return seconds, cpu_used - samples[0][2]


class KsmSettings:
    """KSM at rest. The settings come back with the end of the block."""

    NAMES = ("run", "pages_to_scan", "sleep_millisecs")

    def __enter__(self) -> "KsmSettings":
        self.before = {name: self.read(name) for name in self.NAMES}
        # 2 stops KSM and unshares all pages.
        self.set("run", 2)
        return self

    def read(self, name: str) -> int:
        return int((KSM / name).read_text())

    def set(self, name: str, value: int) -> None:
        (KSM / name).write_text(str(value))

    def __exit__(self, *_) -> None:
        self.set("run", 2)
        for name, value in self.before.items():
            self.set(name, value)


class GroupHost:
    """This machine, with guests and their groups, all of which end with the block."""

    def __init__(self, guests: int, more: dict | None = None):
        """The guests have the files `more`: path on this machine to path in the guest."""
        self.count = guests
        self.dir = Path(tempfile.mkdtemp(prefix="aquifer-groups-"))
        self.ram = Path(tempfile.mkdtemp(prefix="aquifer-groups-", dir="/dev/shm"))
        self.run_dir = self.dir / "run"
        self.run_dir.mkdir()
        self.processes: list = []
        self.vms: list = []
        self.serials: list = []
        self.groups: list = []
        files = {COMMON / "groups-guest.sh": "/bin/groups.sh"} | (more or {})
        try:
            self.kernel, self.initrd, append = boot_parts(self.dir, files)
        except BaseException:
            self.__exit__()
            raise
        self.append = f"{append} rdinit=/bin/groups.sh"

    def __enter__(self) -> "GroupHost":
        return self

    def __exit__(self, *_) -> None:
        self.end()
        for directory in (self.dir, self.ram):
            shutil.rmtree(directory, ignore_errors=True)

    def end(self) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for serial in self.serials:
            serial.close()
        # VMs end before lenders, which they may wait for.
        for run_dir, vm in self.vms:
            self.try_aquifer("vm", "stop", vm, "--force", run_dir=run_dir)
        for process in reversed(self.processes):
            process.terminate()
            process.wait()
        for group in self.groups:
            self.try_aquifer("group", "rm", group)
        self.processes, self.vms, self.serials, self.groups = [], [], [], []
        signal.signal(signal.SIGINT, before)

    def try_aquifer(self, *words, run_dir: Path | None = None) -> None:
        """Runs a command that may fail."""
        command = [AQUIFER, "--run-dir", run_dir or self.run_dir, *words]
        subprocess.run(command, capture_output=True, **self.options())

    def aquifer(self, *words, run_dir: Path | None = None):
        return aquifer("--run-dir", run_dir or self.run_dir, *words, **self.options())

    def options(self) -> dict:
        # Sessions of their own keep ctrl-C from all processes: the script ends them in order.
        env = {**os.environ, "AQUIFER_GROUPS": str(self.dir / "groups")}
        return {"env": env, "start_new_session": True}

    def popen(self, words: list, **more) -> subprocess.Popen:
        process = subprocess.Popen(list(map(str, words)), text=True, **self.options(), **more)
        self.processes.append(process)
        return process

    def create_group(self, name: str, *words) -> None:
        self.aquifer("group", "create", name, *words)
        self.groups.append(name)

    def start_qemu(self, log: Path) -> None:
        """Starts a plain guest, whose memory KSM may merge."""
        memory = f"memory-backend-ram,id=ram,size={MEMORY}M,merge=on"
        self.popen([
            "qemu-system-x86_64", "-machine", "q35,accel=tcg,memory-backend=ram,mem-merge=on",
            "-object", memory, "-m", f"{MEMORY}M", "-smp", "2", "-nodefaults", "-display", "none",
            "-serial", f"file:{log}", "-kernel", self.kernel, "-initrd", self.initrd,
            "-append", self.append,
        ], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def pss(self) -> int:
        """Returns the proportional set size of all processes, in bytes."""
        rollups = [Path(f"/proc/{one.pid}/smaps_rollup").read_text() for one in self.processes]
        lines = [line for text in rollups for line in text.splitlines()]
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024

    def ksm(self) -> dict:
        """Measures KSM at full speed, with plain guests."""
        with KsmSettings() as ksm:
            try:
                logs = [self.dir / f"serial{guest}" for guest in range(self.count)]
                for log in logs:
                    self.start_qemu(log)
                filled = lambda: all(log.exists() and FILLED in log.read_bytes() for log in logs)
                wait("the guests to fill their memory", filled, 300, 0.2)
                time.sleep(3)
                ksmd = run("pgrep", "-x", "ksmd").split()
                memory, used, scanned = self.pss(), cpu(ksmd), ksm.read("pages_scanned")
                ksm.set("pages_to_scan", 1000)
                ksm.set("sleep_millisecs", 0)
                ksm.set("run", 1)
                shared = lambda: ksm.read("pages_sharing") * PAGE
                took, first = until_settled(shared, lambda: cpu(ksmd))
                return {
                    "saved_mib": (memory - self.pss()) / MIB, "of_mib": memory / MIB,
                    "told_mib": shared() / MIB, "seconds": took, "cpu_until_saved": first,
                    "cpu_seconds": cpu(ksmd) - used,
                    "scanned": ksm.read("pages_scanned") - scanned,
                }
            finally:
                self.end()

    def start(
        self, vm: str, group: str, where: list, asked: str = "", run_dir: Path | None = None,
        memory: int = MEMORY, cpus: int = 2,
    ) -> None:
        """Starts a guest as a VM of a group. `where` says where its memory is; `asked` goes onto
        its kernel's command line."""
        self.vms.append((run_dir or self.run_dir, vm))
        status = self.aquifer(
            "vm", "start", vm, "--memory", f"{memory}M", *where, "--group", group, "--cpus", cpus,
            "--accel", "tcg", "--kernel", self.kernel, "--initrd", self.initrd,
            "--append", f"{self.append} {asked}", run_dir=run_dir,
        )
        self.serials.append(socket.socket(socket.AF_UNIX))
        self.serials[-1].connect(status["serial"])

    def wait_until_filled(self) -> None:
        for serial in self.serials:
            serial.settimeout(180)
            said = b""
            while FILLED not in said:
                said += serial.recv(4096)

    def start_group(self) -> None:
        """Starts the guests as VMs of one group."""
        self.create_group("blue")
        for guest in range(self.count):
            self.start(f"vm{guest}", "blue", LOCAL)
        self.wait_until_filled()

    def scan(self, rate, group: str = "blue", report: str = "1s") -> subprocess.Popen:
        return self.popen([
            AQUIFER, "--json", "--run-dir", self.run_dir, "serve", "dedup", group, "--scan", rate,
            "--report", report,
        ], stdout=subprocess.PIPE)

    def order(self, word: str) -> None:
        """Sends an order to all guests."""
        for serial in self.serials:
            serial.sendall(word.encode() + b"\n")

    def set_caches(self, mib: int) -> None:
        for _, vm in self.vms:
            self.aquifer("region", "resize", vm, "--cache", f"{mib}M")

    def rates(self, seconds: int) -> dict:
        """Returns the scanner's reports, one a second, by variant and by what the guests do."""
        self.start_group()
        result = {}
        for variant in ("c", "cs", "csd", "20"):
            scanner = self.scan(variant)
            result[variant] = {}
            for phase, (order, cache) in PHASES.items():
                self.set_caches(cache)
                self.order(order)
                reports = [json.loads(scanner.stdout.readline()) for _ in range(seconds)]
                result[variant][phase] = [
                    {field: one[field] for field in RATE_FIELDS} for one in reports
                ]
            self.order("idle")
            scanner.terminate()
            scanner.wait()
            self.processes.remove(scanner)
            self.set_caches(MEMORY + 64)
            self.aquifer("serve", "dedup", "blue", "--undo")
        self.end()
        return result

    def taken(self) -> int:
        """Returns the bytes that the files of regions and frames take."""
        regions = self.run_dir / "regions"
        files = [*regions.glob("vm*"), *regions.glob("@*/frames")]
        return sum(os.stat(path).st_blocks for path in files) * 512

    def group(self) -> dict:
        """Measures a group's scanner as fast as it can, with VMs of the group."""
        self.start_group()
        time.sleep(3)
        memory = self.taken()
        shown = [self.aquifer("region", "show", vm) for _, vm in self.vms]
        engines = [one["pid"] for one in shown]
        programs = [pid for one in shown for pid in one["processes"]]
        spent = lambda: cpu(engines) + cpu(programs, "aquifer")
        used = spent()
        scanner = self.scan(100000)
        saved_now = lambda: max(0, memory - self.taken())
        took, first = until_settled(saved_now, lambda: cpu([scanner.pid]) + spent())
        scans = cpu([scanner.pid])
        merges = spent() - used
        last = json.loads(scanner.stdout.readline())
        saved = memory - self.taken()
        # Reads the reports of the meantime, to the last.
        scanner.terminate()
        for line in scanner.stdout:
            last = json.loads(line)
        scanner.wait()
        result = {
            "saved_mib": saved / MIB, "of_mib": memory / MIB,
            "told_mib": (last["saved_bytes"] + last["zero"] * PAGE) / MIB, "seconds": took,
            "cpu_until_saved": first, "cpu_seconds": scans + merges, "scanner_cpu_seconds": scans,
            "scanned": last["scanned"], "mappings_per_page": last["mappings_per_page"],
            "broken": last["broken"],
        }
        self.end()
        return result
