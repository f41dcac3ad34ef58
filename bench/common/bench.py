"""The parts that all scripts in bench/ share: paths, arguments, results, waiting and cgroups.

Every script takes --rounds and --json. With --json it prints one JSON value on standard output, and
nothing else. In that value, the elements of a list are samples of one thing. `bench/compare` takes
their median, so that figures of different things belong in an object.
"""

import argparse
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMON = ROOT / "bench/common"
# The programs under test. `bench/compare` sets the variable to measure two builds.
BUILT = Path(os.environ.get("AQUIFER_BUILT_DIR") or ROOT / "target/release").resolve()
AQUIFER = BUILT / "aquifer"
TESTBED = BUILT / "testbed"
EXAMPLES = BUILT / "examples"
# Debian's Python, which has the modules nbd, numpy and matplotlib.
PYTHON = "/usr/bin/python3"
NAME = Path(sys.argv[0]).stem

MIB = 1 << 20
GIB = 1 << 30
PAGE = 4096

CGROUP_V1 = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists()
MEMORY_CGROUPS = Path("/sys/fs/cgroup/memory" if CGROUP_V1 else "/sys/fs/cgroup")
BLKIO_CGROUPS = Path("/sys/fs/cgroup/blkio")

# Standard output as it was before `parse` kept it for the result.
_json_output = None


class Failed(SystemExit):
    """Ends the script with a message that names it."""

    def __init__(self, why: str):
        super().__init__(f"{NAME}: {why}")


def arguments(doc: str, rounds: int | None, picture: bool = False) -> argparse.ArgumentParser:
    """A parser with the arguments that all scripts take, and `--picture` where there is one."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = f" (default: {rounds})" if rounds else ""
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds to measure{default}")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON value, with the samples, and no text"
    )
    if picture:
        parser.add_argument("--picture", metavar="FILE.png", help="draw the result into this file")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line. With --json, all other output goes to standard error from now on,
    that of child processes included."""
    global _json_output
    given = parser.parse_args()
    if getattr(given, "picture", None) and not importlib.util.find_spec("matplotlib"):
        raise Failed("missing: matplotlib; run: scripts/install-packages bench")
    if given.json:
        sys.stdout.flush()
        _json_output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
    return given


def finish(result, report) -> None:
    """Prints the result as JSON if --json was given, and otherwise calls `report` with it."""
    if _json_output is None:
        report(result)
        return
    json.dump(result, _json_output)
    _json_output.write("\n")
    _json_output.flush()


def start(main) -> None:
    """Runs a script. On SIGTERM and ctrl-C its `finally` blocks stop all that it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"{NAME}: stopped by SIGTERM"))
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)


def note(text: str) -> None:
    """Reports progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def wait(what: str, condition, timeout: float = 60, pause: float = 0.02) -> None:
    """Waits until the condition holds; `what` names it in the message of a timeout."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise Failed(f"timeout after {timeout:g} s: {what}")
        time.sleep(pause)


def connect(path: Path, timeout: float = 20) -> socket.socket:
    """Connects to a Unix socket as soon as a server listens there."""
    connection = socket.socket(socket.AF_UNIX)

    def connected() -> bool:
        try:
            connection.connect(str(path))
        except OSError:
            return False
        return True

    try:
        wait(f"a server at {path}", connected, timeout)
    except BaseException:
        connection.close()
        raise
    return connection


def run(*command) -> str:
    """Runs a command that must succeed, and returns its standard output."""
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"'{' '.join(words)}' failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


def boot_parts(directory: Path, files: dict, modules: list | tuple = ()) -> list:
    """Makes a guest's boot files, with `files`: path on this machine to path in the guest. Returns
    the kernel, the initrd and the kernel's arguments."""
    words = [word for here, there in files.items() for word in ("--file", f"{here}:{there}")]
    words += [word for module in modules for word in ("--module", module)]
    return run(TESTBED, "parts", *words, directory).splitlines()


class Started:
    """A context that `start` begins and `end` ends, also after a `start` that fails half-way. An
    interrupt must not stop `end`."""

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.end()
        signal.signal(signal.SIGINT, before)


def aquifer(*words, **options):
    """Runs an `aquifer` command that must succeed, and returns the JSON that it prints."""
    command = [AQUIFER, "--json", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise Failed(f"'aquifer {' '.join(map(str, words))}' failed: {done.stderr.strip()}")
    return json.loads(done.stdout or "null")


def nbdkit_memory(socket: Path | str, size: int) -> list:
    """Returns the command that serves `size` bytes of nbdkit's memory plugin at the socket."""
    return ["nbdkit", "-f", "-U", str(socket), "memory", str(size)]


def end(process: subprocess.Popen) -> None:
    """Kills a process, and waits until it is gone."""
    process.kill()
    process.wait()


def require(*programs: str) -> None:
    """Fails unless all these programs are installed."""
    missing = [program for program in programs if not shutil.which(program)]
    if missing:
        raise Failed(f"missing: {', '.join(missing)}; run: scripts/install-packages bench")


def size(text: str) -> int:
    """Bytes of a size such as 256M or 1G."""
    return int(text.rstrip("MGiB")) << (30 if "G" in text else 20)


def cpu_seconds(stat: Path) -> float:
    """CPU time of the process or thread that has this file `stat` in /proc."""
    fields = stat.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spread(values) -> dict:
    """The median of the values, with the lowest and the highest."""
    values = list(values)
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def spread_text(of: dict, digits: int = 2) -> str:
    """A spread as text, such as `1.02 (0.90 to 1.43)`."""
    low, high = f"{of['lowest']:.{digits}f}", f"{of['highest']:.{digits}f}"
    return f"{of['median']:.{digits}f} ({low} to {high})"


class MemoryCgroup:
    """A memory cgroup, of version 1 or 2, with a limit in bytes. Without `may_swap`, memory beyond
    the limit is not swapped either."""

    def __init__(self, name: str, limit: int, may_swap: bool = True):
        # Process ids repeat: drills have PID namespaces, and all share the tree of cgroups.
        self.path = MEMORY_CGROUPS / f"aquifer-bench-{secrets.token_hex(4)}-{name}"
        if not CGROUP_V1:
            (MEMORY_CGROUPS / "cgroup.subtree_control").write_text("+memory")
        self.path.mkdir()
        file = "memory.limit_in_bytes" if CGROUP_V1 else "memory.max"
        (self.path / file).write_text(str(limit))
        if not may_swap:
            self.forbid_swap(limit)

    def forbid_swap(self, limit: int) -> None:
        if not CGROUP_V1:
            (self.path / "memory.swap.max").write_text("0")
            return
        (self.path / "memory.swappiness").write_text("0")
        both = self.path / "memory.memsw.limit_in_bytes"
        # Kernels without swap accounting lack it.
        if both.exists():
            both.write_text(str(limit))

    def enter(self) -> None:
        """Moves the calling process into the cgroup."""
        (self.path / "cgroup.procs").write_text("0")

    def is_empty(self) -> bool:
        return not (self.path / "cgroup.procs").read_text()

    def remove(self) -> None:
        """Removes the cgroup once its processes have ended: ctrl-C does not wait for them."""
        wait(f"the processes in {self.path} to end", self.is_empty)
        self.path.rmdir()
