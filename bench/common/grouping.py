"""Guests on this host, alone or as VMs of groups, for lab/groups and lab/consolidation. All of it ends with the block in which it is used."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT = Path(os.environ.get("AQUIFER_BUILT", ROOT / "target/release"))
AQUIFER = BUILT / "aquifer"
KSM = Path("/sys/kernel/mm/ksm")
MIB = 1 << 20
PAGE = 4096
MEMORY = 256
SAYS = b"its memory is full"
LOCAL = ["--cache", f"{MEMORY + 64}M", "--emulate-link", "1us"]


def ticks(stat: Path) -> int:
    try:
        fields = stat.read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])
    except (OSError, IndexError):
        return 0


def cpu(processes: list, thread: str | None = None) -> float:
    """Seconds that these processes have used, or their threads of that name."""
    total = 0
    for pid in processes:
        if thread is None:
            total += ticks(Path(f"/proc/{pid}/stat"))
            continue
        for task in Path(f"/proc/{pid}/task").glob("*"):
            try:
                if (task / "comm").read_text().strip() == thread:
                    total += ticks(task / "stat")
            except OSError:
                pass
    return total / os.sysconf("SC_CLK_TCK")


def until_settled(saved, used, timeout: float = 180) -> tuple:
    """Waits until that has not grown by 1 % for 3 s. Seconds, and seconds of CPU, until 99 % of it was saved."""
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
    _, seconds, cpu_seconds = next(sample for sample in samples if sample[0] >= 0.99 * samples[-1][0])
    return seconds, cpu_seconds - samples[0][2]


class Lab:
    def __init__(self, guests: int, more: dict = {}):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        self.count = guests
        self.dir = Path(tempfile.mkdtemp(prefix="aquifer-groups-"))
        self.ram = Path(tempfile.mkdtemp(prefix="aquifer-groups-", dir="/dev/shm"))
        self.run_dir = self.dir / "run"
        self.run_dir.mkdir()
        self.processes: list = []
        self.vms: list = []
        self.serials: list = []
        self.groups: list = []
        files = {ROOT / "lab/groups-guest.sh": "/bin/groups.sh"} | more
        words = [word for here, there in files.items() for word in ("--file", f"{here}:{there}")]
        try:
            parts = subprocess.run([BUILT / "testbed", "parts", *words, self.dir], capture_output=True, text=True, check=True)
        except BaseException:
            self.__exit__()
            raise
        self.kernel, self.initrd, append = parts.stdout.splitlines()
        self.append = f"{append} rdinit=/bin/groups.sh"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()
        for directory in (self.dir, self.ram):
            shutil.rmtree(directory, ignore_errors=True)

    def end(self) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for serial in self.serials:
            serial.close()
        # VMs before lenders, which they may wait for.
        for run_dir, vm in self.vms:
            self.run("vm", "stop", vm, "--force", run_dir=run_dir)
        for process in reversed(self.processes):
            process.terminate()
            process.wait()
        for group in self.groups:
            self.run("group", "rm", group)
        self.processes, self.vms, self.serials, self.groups = [], [], [], []
        signal.signal(signal.SIGINT, before)

    def run(self, *words, run_dir: Path | None = None):
        words = [AQUIFER, "--json", "--run-dir", run_dir or self.run_dir, *map(str, words)]
        # In a session of its own, as all that is started: ctrl-C is for the script, which ends them in order.
        return subprocess.run(words, capture_output=True, text=True, env=self.env(), start_new_session=True)

    def aquifer(self, *words, run_dir: Path | None = None):
        done = self.run(*words, run_dir=run_dir)
        if done.returncode != 0:
            sys.exit(f"aquifer {' '.join(map(str, words))}: {done.stderr}")
        return json.loads(done.stdout or "null")

    def env(self) -> dict:
        return {**os.environ, "AQUIFER_GROUPS": str(self.dir / "groups")}

    def popen(self, words: list, **more):
        process = subprocess.Popen(list(map(str, words)), text=True, start_new_session=True, env=self.env(), **more)
        self.processes.append(process)
        return process

    def create_group(self, name: str, *words) -> None:
        self.aquifer("group", "create", name, *words)
        self.groups.append(name)

    def ksm(self) -> dict:
        """Plain guests, whose memory KSM may merge."""
        def pss() -> int:
            rollups = [Path(f"/proc/{process.pid}/smaps_rollup").read_text() for process in self.processes]
            return sum(int(line.split()[1]) for text in rollups for line in text.splitlines() if line.startswith("Pss:")) * 1024
        read = lambda name: int((KSM / name).read_text())
        set_to = lambda name, value: (KSM / name).write_text(str(value))
        before = {name: read(name) for name in ("run", "pages_to_scan", "sleep_millisecs")}
        try:
            set_to("run", 2)
            for guest in range(self.count):
                log = self.dir / f"serial{guest}"
                self.popen(
                    ["qemu-system-x86_64", "-machine", "q35,accel=tcg,memory-backend=ram,mem-merge=on", "-object", f"memory-backend-ram,id=ram,size={MEMORY}M,merge=on",
                     "-m", f"{MEMORY}M", "-smp", "2", "-nodefaults", "-display", "none", "-serial", f"file:{log}", "-kernel", self.kernel, "-initrd", self.initrd,
                     "-append", self.append], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            logs = [self.dir / f"serial{guest}" for guest in range(self.count)]
            while not all(log.exists() and SAYS in log.read_bytes() for log in logs):
                time.sleep(0.2)
            time.sleep(3)
            ksmd = subprocess.run(["pgrep", "-x", "ksmd"], capture_output=True, text=True, check=True).stdout.split()
            memory, used, scanned = pss(), cpu(ksmd), read("pages_scanned")
            set_to("pages_to_scan", 1000)
            set_to("sleep_millisecs", 0)
            set_to("run", 1)
            took, first = until_settled(lambda: read("pages_sharing") * PAGE, lambda: cpu(ksmd))
            result = {"saved_mib": (memory - pss()) / MIB, "of_mib": memory / MIB, "told_mib": read("pages_sharing") * PAGE / MIB, "seconds": took, "cpu_until_saved": first,
                      "cpu_seconds": cpu(ksmd) - used, "scanned": read("pages_scanned") - scanned}
        finally:
            set_to("run", 2)
            for name, value in before.items():
                set_to(name, value)
            self.end()
        return result

    def start(self, vm: str, group: str, way: list, asked: str = "", run_dir: Path | None = None, memory: int = MEMORY, cpus: int = 2) -> None:
        """A guest as a VM of a group. `way` is where its memory is; `asked` what its kernel's command line tells it beside the rest."""
        self.vms.append((run_dir or self.run_dir, vm))
        status = self.aquifer("vm", "start", vm, "--memory", f"{memory}M", *way, "--group", group, "--cpus", cpus, "--accel", "tcg", "--kernel", self.kernel, "--initrd", self.initrd,
                              "--append", f"{self.append} {asked}", run_dir=run_dir)
        self.serials.append(socket.socket(socket.AF_UNIX))
        self.serials[-1].connect(status["serial"])

    def until_full(self) -> None:
        for serial in self.serials:
            serial.settimeout(180)
            said = b""
            while SAYS not in said:
                said += serial.recv(4096)

    def start_group(self) -> list:
        """The same guests as VMs of a group; their serial ports."""
        self.create_group("blue")
        for guest in range(self.count):
            self.start(f"vm{guest}", "blue", LOCAL)
        self.until_full()
        return self.serials

    def scan(self, rate, group: str = "blue", report: str = "1s"):
        words = [AQUIFER, "--json", "--run-dir", self.run_dir, "group", "scan", group, "--scan", rate, "--report", report]
        return self.popen(words, stdout=subprocess.PIPE)

    def rates(self, seconds: int) -> dict:
        """What the scanner says second by second, by variant and by what the guests do."""
        serials = self.start_group()
        tell = lambda order: [serial.sendall(order.encode() + b"\n") for serial in serials]
        all_of = {}
        for variant in ("c", "cs", "csd", "20"):
            scanner = self.scan(variant)
            said: dict = {}
            for phase, orders, cache in (("idle", ["idle"], MEMORY + 64), ("busy", ["busy"], MEMORY + 64), ("busy, short of memory", ["walk"], 24)):
                for _, vm in self.vms:
                    self.aquifer("region", "resize-cache", vm, f"{cache}M")
                for order in orders:
                    tell(order)
                said[phase] = [json.loads(scanner.stdout.readline()) for _ in range(seconds)]
            tell("idle")
            scanner.terminate()
            scanner.wait()
            self.processes.remove(scanner)
            for _, vm in self.vms:
                self.aquifer("region", "resize-cache", vm, f"{MEMORY + 64}M")
            self.aquifer("group", "scan", "blue", "--undo")
            keep = lambda one: {key: one[key] for key in ("scan_pages_per_ms", "saved_bytes", "scanner_cpu_pct", "scanned", "merged", "why")}
            all_of[variant] = {phase: [keep(one) for one in ones] for phase, ones in said.items()}
        self.end()
        return all_of

    def group(self) -> dict:
        """VMs of a group, and its scanner as fast as it can."""
        regions = self.run_dir / "regions"
        taken = lambda: sum(os.stat(path).st_blocks for path in [*regions.glob("vm*"), *regions.glob("@*/frames")]) * 512
        self.start_group()
        time.sleep(3)
        memory = taken()
        shown = [self.aquifer("region", "show", vm) for _, vm in self.vms]
        engines, programs = [one["pid"] for one in shown], [pid for one in shown for pid in one["processes"]]
        spent = lambda: cpu(engines) + cpu(programs, "aquifer")
        used = spent()
        scanner = self.scan(100000)
        took, first = until_settled(lambda: max(0, memory - taken()), lambda: cpu([scanner.pid]) + spent())
        scans = cpu([scanner.pid])
        merges = spent() - used
        last = json.loads(scanner.stdout.readline())
        saved = memory - taken()
        # What it has said meanwhile, up to now.
        scanner.terminate()
        for line in scanner.stdout:
            last = json.loads(line)
        scanner.wait()
        result = {"saved_mib": saved / MIB, "of_mib": memory / MIB, "told_mib": (last["saved_bytes"] + last["zero"] * PAGE) / MIB, "seconds": took, "cpu_until_saved": first,
                  "cpu_seconds": scans + merges, "scanner_cpu_seconds": scans, "scanned": last["scanned"], "mappings_per_page": last["mappings_per_page"],
                  "broken": last["broken"]}
        self.end()
        return result
