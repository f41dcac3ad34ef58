#!/usr/bin/python3 -B
"""Measures a VM whose memory the agent may move (`--cache auto`) beside memory of QEMU's own.

No page has left this host yet, so the kernel alone serves all of them. `qemu` is the anonymous
memory that QEMU has without Aquifer, in huge pages. `plain` is the memory of a VM with
`--cache none`, a memfd. Emulated guests (TCG) run three loads: random access (a hash table of awk),
sequential access (copies of a file in RAM, compared), and many short programs over many files, as
in a build.
A guest under KVM that needs no kernel changes random and sequential words (`flat_guest`); beside it
the same guest has anonymous memory of its own program in huge pages. First touches are told apart:
they come once. The guests of one round run one after the other, in changing order. Target: at most
1.03 times the time of `qemu`.

Build first:
    cargo build --release --workspace --lib --bins --examples

Usage: bench/local_memory.py [--rounds N] [--json]
    (as root, on an otherwise idle machine)
"""

import json
import time
from pathlib import Path

from common import bench
from common.bench import EXAMPLES, note, spread, spread_text
from common.resizing import Host

KINDS = ("qemu", "plain", "auto")
FLAT_KINDS = ("qemu", "auto")
TARGET = 1.03
MEMORY = "512M"
LOADS = {
    "random": "awk 'BEGIN { for (i = 0; i < 150000; i++) a[(i * 7919) % 150001] = i; "
              "for (i = 0; i < 150000; i++) s += a[(i * 104729) % 150001]; print s }'",
    "sequential": "for i in 1 2 3; do cp /tmp/first /tmp/second && "
                  "cmp /tmp/first /tmp/second || exit 1; done",
    "programs": "rm -rf /tmp/tree && mkdir /tmp/tree && cd /tmp/tree && "
                "for i in $(seq 40); do head -c 20000 /bin/busybox > file$i; "
                "gzip -1 < file$i > file$i.gz; done && tar cf all.tar . && "
                "find . -type f | sort | xargs md5sum | cut -c 1-8 | sort -u | wc -l; cd /",
}
FIRST = "head -c 134217728 /dev/zero > /tmp/first"
FLAT = {"random": ("random", "200000"), "sequential": ("sequential", "200000")}


# Runs QEMU with anonymous memory instead of a memfd.
ANONYMOUS = r"""#!/bin/bash
for word; do
    case $word in
        memory-backend-memfd,*) word=$(sed 's/-memfd,/-ram,/; s/,share=on//' <<< "$word") ;;
    esac
    words+=("$word")
done
exec qemu-system-x86_64 "${words[@]}"
"""


def order(kinds: tuple, number: int) -> tuple:
    """Returns the kinds in the order of a round: each kind comes first in turn."""
    first = number % len(kinds)
    return kinds[first:] + kinds[:first]


def timed(guest, command: str) -> float:
    began = time.monotonic()
    guest(command)
    return time.monotonic() - began


def emulated(rounds: int) -> dict:
    """Returns the seconds of each load in each kind of memory."""
    took: dict = {load: {kind: [] for kind in KINDS} for load in ("first", *LOADS)}
    with Host() as host:
        wrapper = Path(host.dir) / "qemu"
        wrapper.write_text(ANONYMOUS)
        wrapper.chmod(0o755)
        own = ["--cache", "none"]
        more = {"qemu": [*own, "--qemu", wrapper], "plain": own, "auto": []}
        guests = {
            kind: host.guest(kind, MEMORY, MEMORY, *more[kind], cpus=1) for kind in KINDS
        }
        for kind in KINDS:
            took["first"][kind].append(timed(guests[kind], FIRST))
        for number in range(rounds + 1):
            for load, command in LOADS.items():
                for kind in order(KINDS, number):
                    seconds = timed(guests[kind], command)
                    # The first pass touches memory for the first time.
                    if number > 0:
                        took[load][kind].append(seconds)
            note(f"emulated: round {number} of {rounds}")
        region = host.aquifer("region", "show", "auto")
        if region["counts"]["zero_faults"] or region["usage"]["remote"]:
            raise bench.Failed(f"pages of the VM went through the engine: {region['counts']}")
    return took


def flat(rounds: int) -> dict:
    took: dict = {
        load: {kind: [] for kind in FLAT_KINDS}
        for load in ("kvm_first", *(f"kvm_{load}" for load in FLAT))
    }
    with Host() as host:
        for number in range(rounds):
            for load, words in FLAT.items():
                sums = set()
                for kind in order(FLAT_KINDS, number):
                    memory = "256M"
                    if kind == "auto":
                        made = host.aquifer(
                            "region", "create", "flat", "--size", "256M", "--cache", "auto"
                        )
                        memory = made["file"]
                    done = json.loads(bench.run(EXAMPLES / "flat_guest", memory, *words, "4"))
                    if kind == "auto":
                        bench.wait("the region's end", lambda: removed(host))
                    took["kvm_first"][kind].append(done["first"])
                    took[f"kvm_{load}"][kind] += done["passes"]
                    sums.add(done["sum"])
                if len(sums) != 1:
                    raise bench.Failed(f"the memories differ after {load}: {sums}")
            note(f"under KVM: round {number + 1} of {rounds}")
    return took


def removed(host: Host) -> bool:
    try:
        return host.aquifer("region", "rm", "flat").get("done") == "removed"
    except bench.Failed:
        return False


def report(result: dict) -> None:
    print(f"{'load':<16}" + "".join(f"{kind + ' s':>24}" for kind in KINDS) + "   ratio  target")
    for load, of in result.items():
        ratio = of["ratio"]
        met = "met" if ratio <= TARGET else "missed"
        target = "none" if "first" in load else f"{TARGET} {met}"
        texts = [spread_text(spread(of[kind]), 3) if kind in of else "-" for kind in KINDS]
        print(f"{load:<16}" + "".join(f"{text:>24}" for text in texts) + f"{ratio:>8.3f}  {target}")


def main() -> None:
    given = bench.parse(bench.arguments(__doc__, 5))
    result = emulated(given.rounds) | flat(given.rounds)
    for of in result.values():
        median = {kind: spread(seconds)["median"] for kind, seconds in of.items()}
        of["ratio"] = median["auto"] / median["qemu"]
    bench.finish(result, report)


bench.start(main)
