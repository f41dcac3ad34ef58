#!/usr/bin/env python3
"""The elastic store: a 2 GiB lease with 1 GiB written, and what it costs in RAM as /proc shows it; then the same discarded.
RAM is RssShmem (the stored pages) and RssAnon (what is kept beside them) of /proc/PID/status of the server."""
import json, os, pathlib, re, signal, subprocess, tempfile, time

AQUIFER = os.environ.get("AQUIFER", "target/release/aquifer")
GIB = 1 << 30


def rss(pid, kind):
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"^Rss{kind}:\s+(\d+) kB", text, re.M)[1]) * 1024


def nbdsh(uri, *steps):
    code = ["import os"] + list(steps)
    subprocess.run(["/usr/bin/python3", "-m", "nbd", "-u", uri] + [word for step in code for word in ("-c", step)], check=True)


with tempfile.TemporaryDirectory(prefix="aquifer-lab-") as tmp:
    with subprocess.Popen([AQUIFER, "--json", "export", "2G", "--nbd", f"unix:{tmp}/nbd.sock"],
                          stdout=subprocess.PIPE, text=True) as server:
        try:
            uri = json.loads(server.stdout.readline())["uri"]
            nbdsh(uri, "h.pwrite(b'x', 0)", "h.trim(4096, 0)")
            shmem_before, anon_before = rss(server.pid, "Shmem"), rss(server.pid, "Anon")
            # Every other page, so that nothing of the accounting can be shared between neighbours.
            nbdsh(uri, "page = os.urandom(4096)", "[h.pwrite(page, i * 8192) for i in range(262144)]")
            stored, kept = rss(server.pid, "Shmem") - shmem_before, rss(server.pid, "Anon") - anon_before
            print(f"2 GiB lease, 1 GiB written in single pages: {stored / GIB:.4f} GiB of shared memory, "
                  f"{kept / 1024:.0f} KiB kept beside it")
            print(f"  in all {100 * (stored + kept) / GIB - 100:+.2f} % over 1 GiB; {kept / 262144:.1f} bytes a stored page")
            nbdsh(uri, "h.trim(h.get_size() // 2, 0)", "h.trim(h.get_size() // 2, h.get_size() // 2)")
            time.sleep(0.2)
            left = rss(server.pid, "Shmem") - shmem_before
            print(f"discarded: {left / 1024:.0f} KiB of shared memory left")
        finally:
            server.send_signal(signal.SIGTERM)
