"""Hosts and guests of two_tenants.py, with and without Aquifer."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from common import bench
from common.bench import (
    COMMON, EXAMPLES, MIB, MemoryCgroup, Started, boot_parts, end, note, run,
)

TENANTS = ("blue", "green")
HOSTS = ("h1", "h2")
# Guests of each tenant on each host.
GUESTS = 2
MACHINE = "q35"
MODULES = ["virtio_pci", "virtio_balloon"]


class Told(NamedTuple):
    """The last report of a guest: what it was asked for, and counts of pages."""

    began: int
    asked: int
    rate: int
    mib: int
    visits: int
    written: int
    verified: int
    wrong: int


class Boot(Started):
    """The boot files of all guests, which end with the block."""

    def start(self) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="aquifer-tenants-"))
        files = {COMMON / "tenant-guest.sh": "/bin/guest.sh", EXAMPLES / "tenant": "/bin/tenant"}
        self.kernel, self.initrd, append = boot_parts(self.dir, files, MODULES)
        self.append = f"{append} init_on_alloc=0 rdinit=/bin/guest.sh"

    def end(self) -> None:
        shutil.rmtree(self.dir, ignore_errors=True)

    def append_of(self, guest: "Guest") -> str:
        return f"{self.append} seed={guest.seed}"


class Guest:
    """A guest of a tenant. `home` is the host where it starts."""

    def __init__(self, tenant: str, home: int, number: int):
        self.tenant, self.home = tenant, home
        self.name = f"{tenant}-{home * GUESTS + number + 1}"
        self.seed = TENANTS.index(tenant) * 8 + home * GUESTS + number + 1
        self.last: Told | None = None
        self.restarts = 0
        self.lost = False

    def note(self, text: str) -> None:
        """Takes in the end of the guest's console."""
        for line in text.split("\n")[:-1]:
            words = line.split()
            if words[:1] != ["tenant"] or len(words) != 9:
                continue
            try:
                told = Told(*map(int, words[1:]))
            except ValueError:
                continue
            if self.last and told.began > self.last.began:
                self.restarts += 1
            if not self.last or (told.began, told.written) >= (self.last.began, self.last.written):
                self.last = told


def guests() -> list:
    return [
        Guest(tenant, home, number) for home in range(len(HOSTS)) for tenant in TENANTS
        for number in range(GUESTS)
    ]


def tail(path: Path, size: int = 2048) -> str:
    """Returns the end of a file; nothing if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


class Serials:
    """Connections to the serial ports of guests. They stay, as QEMU forgets what a guest has not
    read when its peer goes. Threads read what guests print, or QEMU would let the guests wait."""

    def __init__(self):
        self.open: dict = {}

    def send(self, path: Path, line: str) -> None:
        """Sends a line to a guest, if it is there."""
        for _ in range(2):
            try:
                if path not in self.open:
                    self.open[path] = socket.socket(socket.AF_UNIX)
                    self.open[path].settimeout(5)
                    self.open[path].connect(str(path))
                    self.open[path].settimeout(None)
                    threading.Thread(target=drain, args=[self.open[path]], daemon=True).start()
                return self.open[path].sendall(f"{line}\n".encode())
            except OSError:
                # A VM that left this host may be back.
                self.open.pop(path).close()

    def close(self) -> None:
        for serial in self.open.values():
            serial.close()


def drain(serial: socket.socket) -> None:
    try:
        while serial.recv(4096):
            pass
    except OSError:
        pass


class Cgroup(MemoryCgroup):
    """A memory cgroup with what it counts."""

    def field(self, file: str, key: str) -> int:
        for line in (self.path / file).read_text().splitlines():
            words = line.split()
            if words[0] == key:
                return int(words[1])
        return 0

    def used(self) -> int:
        """Returns the RAM that the kernel cannot drop: processes, and files in memory."""
        if not bench.CGROUP_V1:
            return self.field("memory.stat", "anon") + self.field("memory.stat", "shmem")
        return self.field("memory.stat", "total_rss") + self.field("memory.stat", "total_shmem")

    def swapped(self) -> int:
        if not bench.CGROUP_V1:
            return int((self.path / "memory.swap.current").read_text())
        return self.field("memory.stat", "total_swap")

    def peak(self) -> int:
        """Returns the most that the kernel charged, with files that it could drop."""
        file = "memory.max_usage_in_bytes" if bench.CGROUP_V1 else "memory.peak"
        return int((self.path / file).read_text())

    def kills(self) -> int:
        file = "memory.oom_control" if bench.CGROUP_V1 else "memory.events"
        return self.field(file, "oom_kill")

    def pids(self) -> list:
        return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]

    def close(self) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.remove()


class Swap(Started):
    """A swap file on the disk, with a name of its own; it ends with the block."""

    def __init__(self, directory: Path, size: int):
        self.file, self.size, self.on = directory / f"swap-{os.getpid()}", size, False

    def start(self) -> None:
        run("fallocate", "-l", self.size, self.file)
        self.file.chmod(0o600)
        run("mkswap", self.file)
        run("swapon", self.file)
        self.on = True

    def end(self) -> None:
        if self.on:
            run("swapoff", self.file)
        self.file.unlink(missing_ok=True)


class Site(Started):
    """Two hosts with all guests, which end with the block."""

    def __init__(self, boot: Boot, ram: int, memory: int, disk: Path | None):
        """`disk` is a blkio cgroup that makes the disk slower."""
        self.boot, self.ram, self.memory, self.disk = boot, ram, memory, disk
        self.guests = guests()
        self.serials = Serials()
        self.cgroups: list = []
        # The most RAM that each host used, and the least guest memory that each tenant had.
        self.most = dict.fromkeys(HOSTS, 0)
        self.most_swapped = 0
        self.least: dict = {}

    def end(self) -> None:
        self.serials.close()
        self.end_guests()
        for cgroup in self.cgroups:
            cgroup.close()

    def cgroup(self, name: str, limit: int) -> Cgroup:
        self.cgroups.append(Cgroup(name, limit))
        return self.cgroups[-1]

    def order(self, orders: dict) -> None:
        """Tells guests what to keep, as (MiB, pages a second), until all have understood it."""
        def waits(guest: Guest) -> bool:
            return not guest.lost and (guest.last.asked, guest.last.rate) != orders[guest]

        asked: dict = {}
        deadline = time.monotonic() + 60
        while waiting := [guest for guest in orders if waits(guest)]:
            if time.monotonic() > deadline:
                for guest in waiting:
                    guest.lost = True
                    note(f"  {guest.name} took no order in 60 s: it is lost")
                break
            for guest in waiting:
                # A VM may have moved since. An order that comes twice does no harm.
                if time.monotonic() - asked.get(guest, 0) > 5:
                    asked[guest] = time.monotonic()
                    self.tell(guest, "{} {}".format(*orders[guest]))
            time.sleep(0.25)
            self.look()

    def check(self) -> None:
        """Lets all guests check all of their memory."""
        left = [guest for guest in self.guests if not guest.lost]
        for guest in left:
            self.tell(guest, "check")
        has_checked = lambda text: "checked\n" in text
        deadline = time.monotonic() + 180
        while left := [guest for guest in left if not has_checked(self.consoles()[guest])]:
            if time.monotonic() > deadline:
                for guest in left:
                    guest.lost = True
                    note(f"  {guest.name} did not check its memory in 180 s: it is lost")
                break
            time.sleep(0.5)
        self.look()

    def look(self) -> None:
        """Reads the last reports of the guests."""
        for guest, text in self.consoles().items():
            guest.note(text)

    def sample(self) -> None:
        self.look()
        for host, used in self.used().items():
            self.most[host] = max(self.most[host], used)
        self.most_swapped = max(self.most_swapped, sum(one.swapped() for one in self.cgroups))
        for tenant, has in self.has().items():
            self.least[tenant] = min(self.least.get(tenant, has), has)

    def counts(self) -> dict:
        return {guest.name: guest.last._asdict() for guest in self.guests}

    def tell_state(self) -> None:
        note(str(self.figures()))

    def figures(self) -> dict:
        return {
            "ram_mib": self.ram / MIB,
            "most_used_mib": {host: used / MIB for host, used in self.most.items()},
            "most_charged_mib": {
                cgroup.path.name.split("-", 3)[3]: cgroup.peak() / MIB for cgroup in self.cgroups
            },
            "least_memory_mib": {tenant: has / MIB for tenant, has in self.least.items()},
            "most_swapped_mib": self.most_swapped / MIB,
            "killed": max(sum(cgroup.kills() for cgroup in self.cgroups), self.dead()),
            "lost": sum(guest.lost for guest in self.guests),
            "restarted": sum(guest.restarts for guest in self.guests),
        }


class Plain(Site):
    """Without Aquifer: guests swap to the disk. With `halves`, each guest has a fixed share."""

    def __init__(self, *where, halves: bool):
        super().__init__(*where)
        self.halves, self.processes, self.shared = halves, {}, {}
        self.dir = Path(tempfile.mkdtemp(prefix="aquifer-tenants-"))

    def start(self) -> None:
        for number, host in enumerate(HOSTS):
            here = [guest for guest in self.guests if guest.home == number]
            common = None if self.halves else self.cgroup(host, self.ram)
            for guest in here:
                cgroup = common or self.cgroup(f"{host}-{guest.name}", self.ram // len(here))
                self.shared[guest] = cgroup
                self.processes[guest] = subprocess.Popen(
                    self.qemu(guest), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, start_new_session=True,
                    preexec_fn=lambda cgroup=cgroup: self.enter(cgroup),
                )

    def enter(self, cgroup: Cgroup) -> None:
        cgroup.enter()
        if self.disk:
            (self.disk / "cgroup.procs").write_text("0")

    def qemu(self, guest: Guest) -> list:
        """Returns what `aquifer vm create` starts, with plain memory."""
        size = f"{self.memory >> 20}M"
        serial, log = self.serial(guest), self.log(guest)
        chardev = f"socket,id=serial,server=on,wait=off,path={serial},logfile={log},logappend=on"
        return [
            "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none",
            "-machine", f"{MACHINE},memory-backend=ram", "-accel", "tcg,thread=multi",
            "-cpu", "max,-erms,-fsrm", "-smp", "1",
            "-object", f"memory-backend-ram,id=ram,size={size}", "-m", size,
            "-chardev", chardev, "-serial", "chardev:serial",
            "-device", "virtio-balloon-pci,free-page-reporting=on,deflate-on-oom=on",
            "-kernel", self.boot.kernel, "-initrd", self.boot.initrd,
            "-append", self.boot.append_of(guest),
        ]

    def serial(self, guest: Guest) -> Path:
        return self.dir / f"{guest.name}.serial"

    def log(self, guest: Guest) -> Path:
        return self.dir / f"{guest.name}.log"

    def tell(self, guest: Guest, line: str) -> None:
        self.serials.send(self.serial(guest), line)

    def consoles(self) -> dict:
        return {guest: tail(self.log(guest)) for guest in self.guests}

    def used(self) -> dict:
        used = dict.fromkeys(HOSTS, 0)
        for cgroup, guest in {cgroup: guest for guest, cgroup in self.shared.items()}.items():
            used[HOSTS[guest.home]] += cgroup.used()
        return used

    def has(self) -> dict:
        """Returns the RAM that the memory of each tenant's guests takes."""
        has = dict.fromkeys(TENANTS, 0)
        for guest, process in self.processes.items():
            has[guest.tenant] += resident(process.pid, self.memory)
        return has

    def dead(self) -> int:
        return sum(process.poll() is not None for process in self.processes.values())

    def end_guests(self) -> None:
        for process in self.processes.values():
            end(process)
        shutil.rmtree(self.dir, ignore_errors=True)


def resident(pid: int, size: int) -> int:
    """Returns the RAM that the mapping of this size takes in a process."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        return 0
    sizes = [int(line.split()[1]) << 10 for line in lines if line.startswith(("Size:", "Rss:"))]
    return max((rss for whole, rss in zip(sizes[::2], sizes[1::2]) if whole == size), default=0)
