"""Hosts of a drill: network namespaces on one bridge, and lenders in them."""

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from common.bench import AQUIFER, Failed, Started, end, run
from common.hosts import ADDRESS, Namespace, make_bridge

PORT = 10809
PAGES = "/dev/shm/pages"
HOLD = (
    "mount -t tmpfs t /run && mount -t tmpfs t /dev/shm && mount -t tmpfs t /var/lib && "
    "mount --bind {hosts} /etc/hosts && exec sleep inf"
)


class Host(Namespace):
    """A host: its network, its /run, /var/lib and /dev/shm, and its certificate."""

    def __init__(self, bridge: Namespace, name: str, address: str, work: Path):
        super().__init__(HOLD.format(hosts=work / "hosts"))
        self.name, self.address, self.bridge = name, address, bridge
        self.tls = work / "cluster" / name / "tls"

    def boot(self) -> None:
        self.wait_until_ready()
        self.root = Path(f"/proc/{self.pid}/root")
        self.join(self.bridge, self.name, self.address)

    def launch(self, *words, **options) -> subprocess.Popen:
        """Starts a program on the host. Ctrl-C does not reach it: the script ends it."""
        return subprocess.Popen(
            self.command(*words), text=True, start_new_session=True, **options
        )

    def aquifer(self, *words):
        return json.loads(self.run(AQUIFER, "--json", *words) or "null")

    def connect(self, connected: bool) -> None:
        """Mends the host's link to the bridge, or cuts it."""
        self.bridge.run("ip", "link", "set", "dev", self.name, "up" if connected else "down")

    def shape(self, *words) -> None:
        """Limits what the host sends and receives by a queueing discipline of the kernel."""
        for namespace, link in ((self, "eth0"), (self.bridge, self.name)):
            namespace.run("tc", "qdisc", "replace", "dev", link, "root", *words)

    def unshape(self) -> None:
        for namespace, link in ((self, "eth0"), (self.bridge, self.name)):
            namespace.run("tc", "qdisc", "del", "dev", link, "root")

    def packets(self) -> tuple[int, int]:
        """Returns the packets that these disciplines sent and dropped."""
        said = self.run("tc", "-s", "qdisc", "show", "dev", "eth0")
        said += self.bridge.run("tc", "-s", "qdisc", "show", "dev", self.name)
        counts = re.findall(r"Sent \d+ bytes (\d+) pkt \(dropped (\d+)", said)
        return sum(int(sent) for sent, _ in counts), sum(int(lost) for _, lost in counts)


class Lender:
    """An export on a host of its own. Its pages outlive its process."""

    def __init__(self, host: Host, mib: int, words: tuple = ()):
        self.host, self.mib, self.words = host, mib, words
        self.uri = f"nbds://{host.name}:{PORT}/"
        self.process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        self.process = self.host.launch(
            AQUIFER, "--json", "serve", "export", "--size", f"{self.mib}M",
            "--nbd", f"{self.host.address}:{PORT}", "--tls", self.host.tls, "--dir", PAGES,
            *self.words, stdout=subprocess.PIPE,
        )
        if not self.process.stdout.readline():
            raise Failed(f"the lender on {self.host.name} did not start")

    def kill(self) -> None:
        end(self.process)

    def forget(self) -> None:
        """Removes the pages of a lender that was killed, as a boot of its host does."""
        shutil.rmtree(self.folder())

    def folder(self) -> Path:
        return Path(f"{self.host.root}{PAGES}")

    def stored(self) -> int:
        """Returns the bytes that its pages take."""
        return sum(512 * path.stat().st_blocks for path in self.folder().iterdir())

    def pages(self) -> Path:
        """Returns the file that has the pages."""
        return max(self.folder().iterdir(), key=lambda path: path.stat().st_blocks)


class Scene(Started):
    """A borrower, lenders, and a network between them. All of it ends with the drill."""

    def __init__(self, names: str = "abcdefgh"):
        self.addresses = {name: ADDRESS.format(at + 1) for at, name in enumerate(names)}
        self.hosts: dict = {}
        self.work = Path(tempfile.mkdtemp(prefix="aquifer-drill-"))

    def start(self) -> None:
        lines = [f"{address} {name}\n" for name, address in self.addresses.items()]
        (self.work / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        words = [
            word for name, address in self.addresses.items()
            for word in ("--host", name, "--address", address)
        ]
        run(AQUIFER, "cluster", "init", "--dir", self.work / "cluster", *words)
        self.bridge = make_bridge()

    def host(self, name: str) -> Host:
        """Returns a host, which it makes the first time."""
        if name not in self.hosts:
            self.hosts[name] = Host(self.bridge, name, self.addresses[name], self.work)
            self.hosts[name].boot()
        return self.hosts[name]

    def lender(self, name: str, mib: int = 64, *words) -> Lender:
        return Lender(self.host(name), mib, words)

    def end(self) -> None:
        """Removes the files. The drill's PID namespace ends all processes, and they the rest."""
        shutil.rmtree(self.work, ignore_errors=True)
