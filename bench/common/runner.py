"""Runs the scripts in bench/ for `bench/run` and `bench/compare`."""

import ast
import json
import os
import signal
import subprocess
from pathlib import Path

from common.bench import PYTHON, ROOT, Failed

BENCH = ROOT / "bench"


def scripts() -> dict[str, Path]:
    """Returns the scripts by name."""
    return {path.stem: path for path in sorted(BENCH.glob("*.py"))}


def summary(path: Path) -> str:
    """Returns the first line of a script's documentation, which is its first sentence."""
    return ast.get_docstring(ast.parse(path.read_text())).splitlines()[0]


def script(name: str) -> Path:
    """Finds a script. A name with its folder or suffix is accepted too."""
    path = scripts().get(Path(name).stem)
    if path is None:
        raise Failed(f"no benchmark '{name}'; bench/run lists them")
    return path


def require_root() -> None:
    if os.geteuid() != 0:
        raise Failed("benchmarks need root: for network namespaces, cgroups, swap and KSM")


def run_script(path: Path, arguments: list, built: Path | None = None):
    """Runs a script with --json, and returns its result. `built` holds the programs under test."""
    env = os.environ | ({"AQUIFER_BUILT_DIR": str(built)} if built else {})
    # A session of its own: ctrl-C goes to this program only, which lets the script end in order.
    process = subprocess.Popen(
        [PYTHON, "-B", path, "--json", *arguments], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, text=True, env=env, start_new_session=True,
    )
    try:
        output = process.communicate()[0]
    except BaseException:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        process.terminate()
        process.communicate()
        signal.signal(signal.SIGINT, before)
        raise
    if process.returncode != 0:
        raise Failed(f"'{' '.join([path.stem, *arguments])}' failed ({process.returncode})")
    return json.loads(output)
