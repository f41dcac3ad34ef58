#!/usr/bin/env python3
"""An idle lender with a 4 GiB lease: CPU used over 10 s, by /proc/PID/stat. Both kinds: a stand-alone export with a client
connected, and an agent that has granted a lease to another agent."""
import json, os, pathlib, shutil, signal, subprocess, sys, tempfile, time

AQUIFER = os.environ.get("AQUIFER", "target/release/aquifer")
SECONDS = 10


def cpu_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle(what, pid):
    before = cpu_seconds(pid)
    time.sleep(SECONDS)
    used = cpu_seconds(pid) - before
    print(f"{what:45} {used:6.2f} s of {SECONDS} s = {100 * used / SECONDS:.1f} %")


def export(tmp):
    with subprocess.Popen([AQUIFER, "--json", "export", "4G", "--nbd", f"unix:{tmp}/nbd.sock"],
                          stdout=subprocess.PIPE, text=True) as server:
        try:
            uri = json.loads(server.stdout.readline())["uri"]
            subprocess.run(["/usr/bin/python3", "-m", "nbd", "-u", uri, "-c", "h.pwrite(b'x' * 4096, 0)"], check=True)
            with subprocess.Popen(["/usr/bin/python3", "-m", "nbd", "-u", uri, "-c", "import time; h.pread(4096, 0); time.sleep(60)"]) as client:
                time.sleep(1)
                idle("export of 4 GiB, one client connected", server.pid)
                client.kill()
        finally:
            server.send_signal(signal.SIGTERM)


def agents(tmp):
    subprocess.run([AQUIFER, "init", "--dir", f"{tmp}/c", "--cluster", "lab", "--host", "a", "--address", "127.0.0.1",
                    "--host", "b", "--address", "127.0.0.1"], check=True, stdout=subprocess.DEVNULL)
    running = []
    for host, peer, port, peer_port in (("a", "b", 17070, 17080), ("b", "a", 17080, 17070)):
        config = f"{tmp}/{host}.toml"
        pathlib.Path(config).write_text(f"""host = "{host}"
listen = "127.0.0.1:{port}"
pages = "127.0.0.1:{port + 1}"
tls = "{tmp}/c/{host}/tls"
socket = "{tmp}/{host}/agent.sock"
state = "{tmp}/{host}"
store = "/dev/shm/aquifer/lab-idle-{host}"
[borrow]
spill = "{tmp}/{host}/spill"
[[peer]]
name = "{peer}"
address = "127.0.0.1:{peer_port}"
""")
        log = open(f"{tmp}/{host}.log", "w")
        running.append(subprocess.Popen([AQUIFER, "agent", "--config", config], stderr=log))
    call = lambda host, *words: subprocess.run([AQUIFER, *words, "--socket", f"{tmp}/{host}/agent.sock"], check=True,
                                               stdout=subprocess.DEVNULL)
    try:
        time.sleep(2)
        call("a", "borrow", "4G")
        time.sleep(3)
        idle("agent that has lent 4 GiB, volume connected", running[1].pid)
        call("a", "return")
    finally:
        for agent in running:
            agent.send_signal(signal.SIGINT)
        for agent in running:
            agent.wait(20)


with tempfile.TemporaryDirectory(prefix="aquifer-lab-") as tmp:
    export(tmp)
    agents(tmp)
for host in "ab":
    shutil.rmtree(f"/dev/shm/aquifer/lab-idle-{host}", ignore_errors=True)
