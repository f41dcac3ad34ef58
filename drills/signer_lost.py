#!/usr/bin/python3 -B
"""Kills the signer for good, lets the other hosts' certificates end, and restores it elsewhere.

Open connections go on, and no host can join. Then the lender's agent restarts: its connections
break, and the load waits. The operator gives a copy of the signer's directory to a new host. With
that, all hosts have certificates again, the load goes on, and another host joins.
"""

import signal
import time

from scene import Failed, wait
from scene.agents import DIR, cluster
from scene.certificates import LIFETIME, must_answer, run_until_ended, wait_until_good
from scene.load import Load
from scene.row import Row, start

STUCK_S = 2


def refusal(order) -> str:
    """Returns why an order fails, as it must."""
    try:
        order()
    except Failed as failed:
        return str(failed)
    raise Failed("a host could join without a signer")


def drill(scene) -> Row:
    hosts = cluster(3, lifetime=LIFETIME)
    signer, borrower, lender = hosts.hosts
    heir, newcomer = (hosts.make(hosts.bridge, number) for number in (4, 5))
    load = Load(borrower, [], 64, cache_mib=8)
    load.settle()
    load.run(1)
    must_answer([borrower, lender])
    before = load.borrowed()
    copy = scene.work / "copy"
    signer.run("cp", "-a", f"{DIR}/cluster", copy)

    signer.stop(signal.SIGKILL)
    signer.run("rm", "-r", f"{DIR}/cluster", f"{DIR}/tls")
    join = ("join", f"{borrower.address}:7070", "--token", hosts.token)
    why = refusal(lambda: newcomer.belong(*join))
    if "cannot admit hosts" not in why:
        raise Failed(f"a host cannot join for another reason: {why}")
    run_until_ended(load, [borrower, lender])
    lender.restart(signal.SIGKILL)
    times: dict = {}

    def restore() -> None:
        (copy / "tokens.json").unlink()
        began = time.monotonic()
        heir.run("cp", "-a", copy, f"{DIR}/cluster")
        times["token"] = heir.belong("create")["token"]
        wait_until_good([borrower, lender])
        times["good"] = time.monotonic() - began

    load.run_stuck(STUCK_S, restore)
    must_answer([borrower, lender, heir])
    newcomer.belong("join", f"{heir.address}:7070", "--token", times["token"])
    # The former signer joined nowhere, so only --force ends its certificates.
    heir.aquifer("cluster", "forget", signer.name, "--force", "--config", f"{DIR}/agent.toml")
    alive = {host.name: "up" for host in (borrower, lender, heir, newcomer)}
    wait("the newcomer is in, and the former signer out", lambda: borrower.known() == alive)
    load.run(1)
    load.verify()
    load.must_have_borrowed(before)
    return Row(
        "the signer is lost, certificates end, a connection breaks; a copy goes to a new host",
        load, f"the load went on, then waited for {STUCK_S} s and more; no host could join; "
        f"all had certificates {times['good']:.1f} s after the copy",
    )


if __name__ == "__main__":
    start(drill)
