#!/usr/bin/python3 -B
"""Keeps the signer down until the certificates of the other hosts have ended.

Open connections go on. Then the lender's agent restarts: its connections break, and each page that
is not in RAM is an error. The signer comes back, and the next program reads every page.
"""

import signal

from scene import Failed
from scene.agents import cluster
from scene.certificates import LIFETIME, must_answer, run_until_ended, wait_until_good
from scene.load import Load
from scene.row import Row, start


def drill(scene) -> Row:
    hosts = cluster(3, lifetime=LIFETIME)
    signer, borrower, lender = hosts.hosts
    load = Load(borrower, [], 64, "--fault-timeout", "500ms", cache_mib=2, stride=16)
    load.settle()
    load.run(1)
    must_answer([borrower, lender])
    before = load.borrowed()

    signer.stop(signal.SIGKILL)
    run_until_ended(load, [borrower, lender])
    remote = load.remote()
    lender.restart(signal.SIGKILL)
    # These pages come back, so the row does not count them as lost.
    away = load.ask("verify")
    errors = set(away["lost_pages"])
    if away["wrong"] or not remote or not remote <= errors <= load.remote():
        raise Failed(f"{len(errors)} pages gave an error, {away['wrong']} were wrong; "
                     f"{len(remote)} were not in RAM")

    signer.start()
    good = wait_until_good(hosts.hosts)
    must_answer(hosts.hosts)
    # An error stays in the program that got it.
    versions = scene.work / "versions"
    load.save(versions)
    load.program.stdin.close()
    load.program.wait()
    load.program = load.start(versions)
    load.verify()
    load.run(1)
    load.verify()
    load.must_have_borrowed(before)
    return Row(
        "the signer is down until certificates end; a connection breaks; the signer is back", load,
        f"{len(errors)} pages, those not in RAM, gave an error after "
        f"{away['longest_lost_ms'] / 1000:.1f} s at most, with 128 threads; none did later; all "
        f"had certificates {good:.1f} s after the signer's start",
    )


if __name__ == "__main__":
    start(drill)
