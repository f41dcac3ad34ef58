"""QEMU's machine protocol."""

import json
import socket

from common.bench import Failed


class Monitor:
    """A QMP monitor at a unix socket."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.lines = self.socket.makefile()
        self.lines.readline()
        self("qmp_capabilities")

    def __call__(self, command: str, **arguments):
        message = {"execute": command, "arguments": arguments}
        self.socket.sendall(json.dumps(message).encode())
        while True:
            answer = json.loads(self.lines.readline())
            if "error" in answer:
                raise Failed(f"QEMU: {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]
