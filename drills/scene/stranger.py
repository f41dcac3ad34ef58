"""A caller that has no right to a lease: tries each way in, and prints what it got, as JSON.

Usage: stranger.py ADDRESS LEASE [TLS]; TLS is a directory with another host's certificate.
"""

import json
import socket
import ssl
import struct
import sys
from pathlib import Path

API, PAGES = 7070, 7071
LIST, STARTTLS, GO = 3, 5, 7
ACK, SERVER, TLS_REQUIRED = 1, 2, 1 << 31 | 5
WAIT_S = 10


def connect(address: str, port: int) -> socket.socket:
    return socket.create_connection((address, port), WAIT_S)


def context(tls: str | None) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    if tls:
        # The file of a certificate that was renewed has its key, too.
        has_key = "PRIVATE KEY" in Path(f"{tls}/host.pem").read_text()
        made.load_cert_chain(f"{tls}/host.pem", None if has_key else f"{tls}/host.key")
    return made


def until_closed(stream) -> bytes:
    heard = b""
    try:
        while more := stream.recv(1 << 16):
            heard += more
    except (ConnectionError, ssl.SSLError):
        pass
    return heard


def http(stream, verb: str, path: str, body: dict | None = None) -> str:
    """Sends a request, and returns the status line and the body of the answer."""
    data = json.dumps(body).encode() if body is not None else b""
    head = f"{verb} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    try:
        stream.sendall(head.encode() + data)
    except (ConnectionError, ssl.SSLError):
        return ""
    heard = until_closed(stream).decode(errors="replace")
    return " ".join([*heard.splitlines()[:1], heard.rpartition("\r\n\r\n")[2]]).strip()


class Nbd:
    """The negotiation of an NBD client (fixed newstyle)."""

    def __init__(self, address: str):
        self.stream = connect(address, PAGES)
        self.receive(18)
        self.stream.sendall(struct.pack(">I", 3))

    def receive(self, count: int) -> bytes:
        heard = b""
        while len(heard) < count:
            more = self.stream.recv(count - len(heard))
            if not more:
                raise ConnectionError("closed")
            heard += more
        return heard

    def option(self, option: int, payload: bytes = b"") -> list:
        """Sends an option, and returns the type and the data of each reply."""
        self.stream.sendall(b"IHAVEOPT" + struct.pack(">II", option, len(payload)) + payload)
        replies = []
        while not replies or replies[-1][0] not in (ACK,) and replies[-1][0] < 1 << 31:
            _, _, kind, length = struct.unpack(">QIII", self.receive(20))
            replies.append((kind, self.receive(length)))
        return replies

    def start_tls(self, tls: str | None) -> None:
        self.option(STARTTLS)
        self.stream = context(tls).wrap_socket(self.stream)


def go(lease: str) -> bytes:
    return struct.pack(">I", len(lease)) + lease.encode() + bytes(2)


def refusal(attempt) -> str:
    """Returns how a server refused; raises if it did not."""
    try:
        replies = attempt()
    except (ConnectionError, ssl.SSLError):
        return "closed"
    kinds = [kind for kind, _ in replies]
    if kinds == [TLS_REQUIRED]:
        return "needs TLS"
    if kinds == [ACK]:
        return "an empty list"
    if kinds[-1] >= 1 << 31:
        return "refused"
    sys.exit(f"the server answered: {replies}")


def under_tls(address: str, tls: str | None, option: int, payload: bytes = b"") -> str:
    def attempt() -> list:
        client = Nbd(address)
        client.start_tls(tls)
        return client.option(option, payload)
    return refusal(attempt)


def api(address: str, tls: str | None, *words) -> str:
    try:
        stream = context(tls).wrap_socket(connect(address, API))
    except (ConnectionError, ssl.SSLError):
        return "closed"
    return http(stream, *words) or "closed"


def main() -> None:
    address, lease, *rest = sys.argv[1:]
    tls = rest[0] if rest else None
    orders = {
        "status": ("GET", "/v1/status"),
        "borrow": ("POST", "/v1/borrow", {"bytes": 1 << 26}),
        "end of the lease": ("POST", "/v1/mem_bor_fin", {"lease": lease, "generation": 0}),
    }
    got = {
        "list, in the clear": refusal(lambda: Nbd(address).option(LIST)),
        "open, in the clear": refusal(lambda: Nbd(address).option(GO, go(lease))),
        "list": under_tls(address, tls, LIST),
        "open": under_tls(address, tls, GO, go(lease)),
    }
    got |= {what: api(address, tls, *words) for what, words in orders.items()}
    print(json.dumps(got))


if __name__ == "__main__":
    main()
