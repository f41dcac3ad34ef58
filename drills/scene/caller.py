"""Calls an agent over a new connection with a host's certificate, and prints the answer.

Usage: caller.py ADDRESS TLS; TLS is the directory with the certificate.
"""

import sys

from stranger import api


def main() -> None:
    address, tls = sys.argv[1:]
    print(api(address, tls, "GET", "/v1/offer"))


if __name__ == "__main__":
    main()
