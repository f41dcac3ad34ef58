#!/usr/bin/python3 -B
"""Measures the cost of encrypting a page on its way to a lender, beside pages in the clear.

Both kinds go to a lender each over a Unix socket, in turns, in one run. Build first:
    cargo build --release --workspace --bins --examples

Usage: bench/encryption.py [--rounds N] [--json]
"""

import json
import signal
import subprocess
import tempfile

from common import bench
from common.bench import AQUIFER, EXAMPLES, Failed


def start(directory: str, name: str) -> subprocess.Popen:
    command = [
        AQUIFER, "--json", "--run-dir", f"{directory}/{name}", "serve", "export", "--size", "64M",
        "--nbd", f"unix:{directory}/{name}.sock",
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measure(rounds: int) -> list:
    with tempfile.TemporaryDirectory(prefix="aquifer-bench-") as directory:
        servers: list = []
        names = ("clear", "encrypted")
        try:
            for name in names:
                servers.append(start(directory, name))
                if not servers[-1].stdout.readline():
                    raise Failed("a lender did not start")
            addresses = [f"unix:{directory}/{name}.sock" for name in names]
            command = [EXAMPLES / "encryption", *addresses]
            return [json.loads(bench.run(*command)) for _ in range(rounds)]
        finally:
            for server in servers:
                server.send_signal(signal.SIGTERM)
                server.wait()


def report(result: dict) -> None:
    for number, us in enumerate(result["rounds"]):
        texts = []
        for what in ("write", "read"):
            clear, encrypted = us[f"{what}_us"], us[f"encrypted_{what}_us"]
            texts.append(
                f"{what} {clear:.1f} us, encrypted {encrypted:.1f} us "
                f"({encrypted - clear:+.1f} us, {encrypted / clear:.2f} times)"
            )
        print(f"round {number + 1}: {', '.join(texts)}")


def main() -> None:
    args = bench.parse(bench.arguments(__doc__, rounds=3))
    bench.finish({"rounds": measure(args.rounds)}, report)


if __name__ == "__main__":
    bench.start(main)
