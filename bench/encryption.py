#!/usr/bin/env python3
"""What sealing costs a page that is written to a lender, and one that is read: beside pages as they are, in one run, over unix sockets."""
import json, os, signal, subprocess, tempfile

AQUIFER = os.environ.get("AQUIFER", "target/release/aquifer")
EXAMPLE = os.environ.get("SEALING", "target/release/examples/sealing")

with tempfile.TemporaryDirectory(prefix="aquifer-lab-") as tmp:
    servers = []
    try:
        for name in ("clear", "sealed"):
            server = subprocess.Popen([AQUIFER, "--json", "--run-dir", f"{tmp}/{name}", "export", "64M", "--nbd", f"unix:{tmp}/{name}.sock"],
                                      stdout=subprocess.PIPE, text=True)
            servers.append(server)
            server.stdout.readline()
        for run in range(3):
            done = subprocess.run([EXAMPLE, f"unix:{tmp}/clear.sock", f"unix:{tmp}/sealed.sock"], stdout=subprocess.PIPE, check=True)
            us = json.loads(done.stdout)
            print(f"run {run + 1}: " + ", ".join(
                f"{what} {us[what + '_us']:.1f} us, sealed {us['sealed_' + what + '_us']:.1f} us "
                f"({us['sealed_' + what + '_us'] - us[what + '_us']:+.1f} us, {us['sealed_' + what + '_us'] / us[what + '_us']:.2f} times)"
                for what in ("write", "read")))
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
            server.wait()
