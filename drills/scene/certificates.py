"""Certificates that end within seconds, and what hosts see of them."""

import time
from pathlib import Path

from scene import PYTHON, Failed, wait
from scene.agents import DIR

# Hosts renew after a third of it.
LIFETIME = "12s"
CALLER = Path(__file__).parent / "caller.py"
ANSWER = "HTTP/1.1 200 OK"
LAPSED = "it may only renew it"


def certificate(host) -> dict:
    """Returns what the host's agent says of its certificate, by its own clock. An agent that starts
    says nothing yet."""
    try:
        return host.aquifer("status")["certificate"]
    except Failed:
        return {"state": "unknown", "left_s": 0, "ends": 0}


def is_good(host) -> bool:
    return certificate(host)["state"] in ("good", "ending")


def has_ended(host) -> bool:
    return certificate(host)["state"] == "ended"


def call(caller, callee) -> str:
    """Returns how an agent answers a new connection with the caller's certificate."""
    return caller.run(PYTHON, "-B", CALLER, callee.address, f"{DIR}/tls").strip()


def must_answer(hosts: list) -> None:
    """Fails unless each of these hosts answers a new connection of each other one."""
    pairs = [(a, b) for a in hosts for b in hosts if a is not b]
    for caller, callee in pairs:
        said = call(caller, callee)
        if not said.startswith(ANSWER):
            raise Failed(f"{callee.name} answers {caller.name}: {said}")


def run_until_ended(load, hosts: list) -> None:
    """Lets the load run until the certificates of these hosts have ended, and a second more. Fails
    if the load stops, or if one host still accepts the certificate of another."""
    deadline = time.monotonic() + 60
    while not all(map(has_ended, hosts)):
        load.run(0.5)
        if time.monotonic() > deadline:
            raise Failed("the certificates do not end")
    said = load.run(1)
    if not said["verified"] or not said["written"]:
        raise Failed("the load stopped with the certificates: open connections must go on")
    for caller, callee in zip(hosts, reversed(hosts)):
        said = call(caller, callee)
        if LAPSED not in said:
            raise Failed(f"{callee.name} answers {caller.name}, whose certificate ended: {said}")


def wait_until_good(hosts: list) -> float:
    """Waits until all have certificates that hold, and returns the seconds."""
    began = time.monotonic()
    wait("certificates that hold", lambda: all(map(is_good, hosts)))
    return time.monotonic() - began
