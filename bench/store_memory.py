#!/usr/bin/python3 -B
"""Measures the RAM of a 2 GiB lease with 1 GiB written, and again with all pages discarded.

RAM is RssShmem (the stored pages) and RssAnon (the tables beside them) of the server, from
/proc/PID/status. Needs Debian's python3-libnbd. Build first:
    cargo build --release -p aquifer-cli

Usage: bench/store_memory.py [--rounds N] [--json]
"""

import json
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from common import bench
from common.bench import AQUIFER, GIB, PAGE, PYTHON

PAGES = GIB // PAGE


def rss(pid: int, kind: str) -> int:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"^Rss{kind}:\s+(\d+) kB", text, re.M)[1]) * 1024


def nbdsh(uri: str, *steps: str) -> None:
    words = [word for step in ("import os", *steps) for word in ("-c", step)]
    subprocess.run([PYTHON, "-m", "nbd", "-u", uri, *words], check=True)


def measure() -> dict:
    with tempfile.TemporaryDirectory(prefix="aquifer-bench-") as directory:
        listen = ["--nbd", f"unix:{directory}/nbd.sock"]
        command = [AQUIFER, "--json", "serve", "export", "--size", "2G", *listen]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                uri = json.loads(server.stdout.readline())["uri"]
                nbdsh(uri, "h.pwrite(b'x', 0)", "h.trim(4096, 0)")
                shared, other = rss(server.pid, "Shmem"), rss(server.pid, "Anon")
                # Every other page, so that neighbours cannot share an entry of the tables.
                write = f"[h.pwrite(page, i * 8192) for i in range({PAGES})]"
                nbdsh(uri, "page = os.urandom(4096)", write)
                result = {
                    "shared_bytes": rss(server.pid, "Shmem") - shared,
                    "other_bytes": rss(server.pid, "Anon") - other,
                }
                half = "h.get_size() // 2"
                nbdsh(uri, f"h.trim({half}, 0)", f"h.trim({half}, {half})")
                time.sleep(0.2)
                result["shared_bytes_after_discard"] = rss(server.pid, "Shmem") - shared
            finally:
                server.send_signal(signal.SIGTERM)
    total = result["shared_bytes"] + result["other_bytes"]
    result["overhead_pct"] = 100 * total / GIB - 100
    result["other_bytes_per_page"] = result["other_bytes"] / PAGES
    return result


def report(result: dict) -> None:
    for of in result["rounds"]:
        print(
            f"2 GiB lease, 1 GiB written in single pages: {of['shared_bytes'] / GIB:.4f} GiB of "
            f"shared memory, {of['other_bytes'] / 1024:.0f} KiB beside it"
        )
        print(
            f"  together {of['overhead_pct']:+.2f} % over 1 GiB; "
            f"{of['other_bytes_per_page']:.1f} bytes a stored page"
        )
        left = of["shared_bytes_after_discard"]
        print(f"discarded: {left / 1024:.0f} KiB of shared memory left")


def main() -> None:
    args = bench.parse(bench.arguments(__doc__, rounds=1))
    bench.finish({"rounds": [measure() for _ in range(args.rounds)]}, report)


if __name__ == "__main__":
    bench.start(main)
