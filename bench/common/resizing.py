"""VMs whose memory is resized, for resize.py and group_surplus.py."""

import json
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from common.bench import AQUIFER, BUILT, COMMON, EXAMPLES, Failed, boot_parts, wait

GROWTH = "/machine/peripheral/aquifer-growth"
MODULES = ["virtio_pci", "virtio_mem", "virtio_console", "virtio_balloon", "virtio_blk"]
FOR_GROWTH = "memhp_default_state=online_movable"
# Debian's kernel zeroes each page that it allocates, also where it only tests whether memory can go
# offline. That takes twenty times as long.
NO_INIT = "init_on_alloc=0"


class Host:
    """This machine, with its own run directory, and thus budget. `close` ends what it started."""

    def __init__(self, more: dict | None = None):
        """The guests have the files `more`: path on this machine to path in the guest."""
        self.dir = Path(tempfile.mkdtemp(prefix="aquifer-resize-"))
        self.ram = Path(tempfile.mkdtemp(prefix="aquifer-resize-", dir="/dev/shm"))
        self.run_dir = self.dir / "run"
        self.run_dir.mkdir()
        self.guests: list = []
        self.processes: list = []
        try:
            self.make_boot_files(more or {})
        except BaseException:
            self.close()
            raise

    def make_boot_files(self, more: dict) -> None:
        files = {
            BUILT / "aquifer-guest": "/bin/aquifer-guest",
            COMMON / "resize-guest.sh": "/bin/resize.sh",
            EXAMPLES / "churn": "/bin/churn",
        } | more
        self.kernel, self.initrd, self.append = boot_parts(self.dir, files, MODULES)

    def __enter__(self) -> "Host":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def aquifer(self, *words) -> dict:
        """Runs a command, which may fail if it prints a result all the same."""
        command = [AQUIFER, "--json", "--run-dir", self.run_dir, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 and not done.stdout.strip():
            text = shlex.join(map(str, words))
            raise Failed(f"'aquifer {text}' failed: {done.stderr.strip()}")
        return json.loads(done.stdout or "{}")

    def start(self, words: list, output=subprocess.DEVNULL) -> subprocess.Popen:
        log = (self.dir / "log").open("a")
        process = subprocess.Popen(
            list(map(str, words)), stdin=subprocess.DEVNULL, stdout=output, stderr=log,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def start_aquifer(self, *words, output=subprocess.DEVNULL) -> subprocess.Popen:
        """Starts an `aquifer` command that keeps running on this host."""
        return self.start([AQUIFER, "--json", "--run-dir", self.run_dir, *words], output)

    def guest(
        self, name: str, memory: str, max_memory: str, *more,
        kernel: str = f"{FOR_GROWTH} {NO_INIT}", cpus: int = 2,
    ) -> "Guest":
        append = f"{self.append} {kernel} rdinit=/bin/resize.sh"
        self.guests.append(name)
        self.aquifer(
            "vm", "start", name, "--memory", memory, "--max-memory", max_memory, "--cpus", cpus,
            "--accel", "tcg", "--kernel", self.kernel, "--initrd", self.initrd,
            "--append", append, *more,
        )
        guest = Guest(self, name)
        guest.wait_until_ready()
        return guest

    def stop(self, name: str) -> None:
        command = [AQUIFER, "--run-dir", self.run_dir, "vm", "stop", name, "--force"]
        subprocess.run(command, capture_output=True)

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
        for directory in (self.dir, self.ram):
            shutil.rmtree(directory, ignore_errors=True)


class Guest:
    """A VM that runs resize-guest.sh."""

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
        """Runs a command in the guest, and returns its output as lines. Samples are among them
        while the guest takes samples."""
        return self.end(self.begin(command), command, timeout, good)

    def begin(self, command: str) -> tuple:
        self.commands += 1
        with self.news:
            first = len(self.lines)
        self.socket.sendall(f"{self.commands} {command}\n".encode())
        return self.commands, first

    def end(self, begun: tuple, command: str, timeout: float = 300, good: bool = True) -> list:
        tag, first = begun
        deadline = time.monotonic() + timeout
        with self.news:
            while True:
                for at in range(first, len(self.lines)):
                    line = self.lines[at][1]
                    if line.startswith(f"<{tag} "):
                        output = [line for _, line in self.lines[first:at]]
                        if good and line != f"<{tag} 0":
                            raise Failed(f"{self.name}: '{command}' failed: {line}: {output}")
                        return output
                if not self.news.wait(deadline - time.monotonic()):
                    said = self.lines[first:]
                    raise Failed(f"{self.name}: '{command}': timeout after {timeout} s: {said}")

    def wait_until_ready(self) -> None:
        log = self.files / "console.log"
        wait(f"guest {self.name}", lambda: "ready\n" in log.read_text(errors="replace"))
        show = "aquifer-guest --json show"
        wait(f"the agent of {self.name}", lambda: "true" in " ".join(self(show, good=False)))

    def resize(self, size, *more) -> dict:
        return self.host.aquifer("vm", "resize", self.name, "--memory", size, *more)

    def host_bytes(self) -> int:
        """Returns the host's RAM that the VM takes once the guest has dropped its caches."""
        self("echo 3 > /proc/sys/vm/drop_caches")
        last = -1
        while (now := self.host.aquifer("vm", "show", self.name)["host"]) != last:
            last = now
            time.sleep(2.5)
        return now

    def errors(self) -> list:
        """Returns the errors that the guest's kernel has logged."""
        said = self("dmesg -r | grep -E '^<[0-3]>|BUG|Oops|WARNING' || true")
        return [line for line in said if not line.startswith("sample ")]
