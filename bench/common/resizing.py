"""VMs whose memory is resized: what the parts of lab/resize have in common."""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILT = Path(os.environ.get("AQUIFER_BUILT", ROOT / "target/release"))
AQUIFER = BUILT / "aquifer"
GROWTH = "/machine/peripheral/aquifer-growth"
MODULES = ["virtio_pci", "virtio_mem", "virtio_console", "virtio_balloon", "virtio_blk"]
FOR_GROWTH = "memhp_default_state=online_movable"
# Debian's kernel zeroes each page that it gives out, to itself too where it tries whether memory can go: that takes twenty times as long.
NO_INIT = "init_on_alloc=0"


class Failed(SystemExit):
    def __init__(self, why: str):
        super().__init__(f"{sys.argv[0]}: {why}")


def wait(what: str, condition, timeout: float = 60, pause: float = 0.02) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"{what}: not within {timeout} s")
        time.sleep(pause)


class Host:
    """This machine, with a run directory, and so a budget, of its own. All that it has started ends with `close`."""

    def __init__(self, more: dict | None = None):
        """With `more` files in the guests, by their paths here."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        self.dir = Path(tempfile.mkdtemp(prefix="aquifer-resize-"))
        self.ram = Path(tempfile.mkdtemp(prefix="aquifer-resize-", dir="/dev/shm"))
        self.run_dir = self.dir / "run"
        self.run_dir.mkdir()
        self.guests: list = []
        self.processes: list = []
        try:
            modules = [word for module in MODULES for word in ("--module", module)]
            files = {BUILT / "aquifer-guest": "/bin/aquifer-guest", ROOT / "lab/resize-guest.sh": "/bin/resize.sh", BUILT / "examples/churn": "/bin/churn", **(more or {})}
            words = [word for here, there in files.items() for word in ("--file", f"{here}:{there}")]
            parts = subprocess.run([BUILT / "testbed", "parts", *modules, *words, self.dir], capture_output=True, text=True)
            if parts.returncode != 0:
                raise Failed(f"testbed parts: {parts.stderr.strip()}")
            self.kernel, self.initrd, self.append = parts.stdout.splitlines()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def aquifer(self, *words) -> dict:
        done = subprocess.run([AQUIFER, "--json", "--run-dir", self.run_dir, *map(str, words)], capture_output=True, text=True)
        if done.returncode != 0 and not done.stdout.strip():
            raise Failed(f"aquifer {shlex.join(map(str, words))}: {done.stderr.strip()}")
        return json.loads(done.stdout or "{}")

    def start(self, words: list, output=subprocess.DEVNULL):
        log = (self.dir / "log").open("a")
        process = subprocess.Popen(list(map(str, words)), stdin=subprocess.DEVNULL, stdout=output, stderr=log, start_new_session=True)
        self.processes.append(process)
        return process

    def guest(self, name: str, memory: str, max_memory: str, *more, kernel: str = f"{FOR_GROWTH} {NO_INIT}", cpus: int = 2):
        append = f"{self.append} {kernel} rdinit=/bin/resize.sh"
        self.guests.append(name)
        self.aquifer("vm", "start", name, "--memory", memory, "--max-memory", max_memory, "--cpus", cpus, "--accel", "tcg", "--kernel", self.kernel,
                     "--initrd", self.initrd, "--append", append, *more)
        guest = Guest(self, name)
        guest.is_there()
        return guest

    def stop(self, name: str) -> None:
        subprocess.run([AQUIFER, "--run-dir", self.run_dir, "vm", "stop", name, "--force"], capture_output=True)

    def close(self) -> None:
        for name in self.guests:
            self.stop(name)
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
        for dir in (self.dir, self.ram):
            shutil.rmtree(dir, ignore_errors=True)


class Guest:
    """A VM in which lab/resize-guest.sh runs."""

    def __init__(self, host: Host, name: str):
        self.host, self.name = host, name
        self.files = host.run_dir / "vms" / name
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(self.files / "serial"))
        self.lines: list = []
        self.news = threading.Condition()
        self.commands = 0
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        try:
            for line in self.socket.makefile(errors="replace", newline="\n"):
                with self.news:
                    self.lines.append((time.monotonic(), line.rstrip("\r\n")))
                    self.news.notify_all()
        except OSError:
            pass

    def __call__(self, command: str, timeout: float = 120, good: bool = True) -> list:
        """What a command says in the guest, in lines. (Samples are among them, if they are taken.)"""
        return self.end(self.begin(command), command, timeout, good)

    def begin(self, command: str):
        self.commands += 1
        with self.news:
            first = len(self.lines)
        self.socket.sendall(f"{self.commands} {command}\n".encode())
        return self.commands, first

    def end(self, begun, command: str = "", timeout: float = 300, good: bool = True) -> list:
        tag, first = begun
        deadline = time.monotonic() + timeout
        with self.news:
            while True:
                for at in range(first, len(self.lines)):
                    line = self.lines[at][1]
                    if line.startswith(f"<{tag} "):
                        if good and line != f"<{tag} 0":
                            raise Failed(f"{self.name}: {command}: {line}: {self.lines[first:at]}")
                        return [line for _, line in self.lines[first:at]]
                if not self.news.wait(deadline - time.monotonic()):
                    raise Failed(f"{self.name}: {command}: not within {timeout} s: {self.lines[first:]}")

    def is_there(self) -> None:
        wait(f"guest {self.name}", lambda: "ready\n" in (self.files / "console.log").read_text(errors="replace"))
        wait(f"the agent of {self.name}", lambda: "true" in " ".join(self("aquifer-guest --json show", good=False)))

    def resize(self, size, *more) -> dict:
        return self.host.aquifer("vm", "resize", self.name, size, *more)

    def host_bytes(self) -> int:
        """RAM of this host that it takes, when it has let go of what it need not keep."""
        self("echo 3 > /proc/sys/vm/drop_caches")
        last = -1
        while (now := self.host.aquifer("vm", "show", self.name)["host"]) != last:
            last = now
            time.sleep(2.5)
        return now

    def errors(self) -> list:
        """What its kernel has to say of errors."""
        said = self("dmesg -r | grep -E '^<[0-3]>|BUG|Oops|WARNING' || true")
        return [line for line in said if not line.startswith("sample ")]


class Monitor:
    """The monitor of a VM's QEMU that is free for others."""

    def __init__(self, guest: Guest):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(guest.files / "qmp"))
        self.lines = self.socket.makefile()
        self.lines.readline()
        self("qmp_capabilities")

    def __call__(self, command: str, **arguments):
        self.socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode())
        while True:
            answer = json.loads(self.lines.readline())
            if "error" in answer:
                raise Failed(f"QEMU: {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]
