"""A cluster of hosts with agents. Each has its own /run, /var/lib and /dev/shm."""

import signal
import subprocess
from pathlib import Path

from common.hosts import ADDRESS, DIR, Cluster, Host  # noqa: F401

from scene import AQUIFER, wait


class AgentHost(Host):
    def __init__(self, bridge, number: int):
        super().__init__(bridge, number)
        self.run("mount", "-t", "tmpfs", "t", "/dev/shm")
        self.root = Path(f"/proc/{self.pid}/root")

    def launch(self, *words, **options) -> subprocess.Popen:
        """Starts a program on the host. Ctrl-C does not reach it: the script ends it."""
        return subprocess.Popen(
            self.command(*words), text=True, start_new_session=True, **options
        )

    def start(self) -> None:
        """Starts the agent."""
        words = [AQUIFER, "serve", "agent", "--config", f"{DIR}/agent.toml"]
        self.agent = self.launch(*words, stderr=self.log(), stdout=self.log())

    def log(self):
        return open(self.root / DIR.lstrip("/") / "agent.log", "a")

    def configure(self, section: str, line: str) -> None:
        """Adds a key to a section of the configuration; the agent reads it at its next start."""
        path = self.root / DIR.lstrip("/") / "agent.toml"
        text = path.read_text()
        head = f"[{section}]\n"
        found = head in text
        path.write_text(text.replace(head, head + line + "\n") if found
                        else f"{text}\n{head}{line}\n")

    def wait_until_up(self) -> None:
        wait(f"{self.name} is up", lambda: self.known().get(self.name) == "up")

    def stop(self, number: int) -> None:
        """Ends the agent by the signal."""
        self.agent.send_signal(number)
        self.agent.wait()

    def restart(self, number: int) -> None:
        """Ends the agent by the signal, and starts the next one."""
        self.stop(number)
        self.start()
        self.wait_until_up()

    def end(self) -> None:
        """Does nothing: the drill's PID namespace ends the processes."""


def cluster(count: int, make=AgentHost, lifetime: str | None = None) -> Cluster:
    """Returns a cluster of this many hosts, h1 to hN, which ends with the drill. With a lifetime,
    h1 signs certificates that end after it, and does nothing else: it lends nothing."""
    made = Cluster(make)
    for number in range(count):
        host = made.add()
        if lifetime and number == 0:
            host.configure("certificates", f'lifetime = "{lifetime}"\nfor_drills = true')
            host.configure("lend", "enabled = false")
            host.restart(signal.SIGTERM)
    made.wait_until_all_know(made.hosts, "up")
    return made
