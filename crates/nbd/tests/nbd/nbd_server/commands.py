"""Every command by libnbd, against an empty default export of 16 MiB at the URI given."""

import os
import sys

import nbd

SIZE = 16 << 20
DATA, HOLE = 0, nbd.STATE_HOLE | nbd.STATE_ZERO


def connect():
    handle = nbd.NBD()
    handle.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
    handle.connect_uri(sys.argv[1])
    return handle


def status(offset, count, flags=0):
    """Length and state of each run, one after the other."""
    runs = []
    h.block_status(count, offset, lambda context, at, extents, error: runs.extend(extents), flags)
    return runs


def chunks(flags=0):
    """The chunks in which 24 KiB at the start are read."""
    seen = []

    def note(buf, offset, kind, error):
        seen.append((offset, kind, len(buf)))

    h.pread_structured(24576, 0, note, flags)
    return seen


def refused(errnum, action):
    try:
        action()
    except nbd.Error as error:
        assert error.errnum == errnum, error
    else:
        assert False, "nothing was refused"


h, other = connect(), connect()
assert h.can_multi_conn() and h.can_df() and h.can_fast_zero() and h.can_cache()

data = os.urandom(65536)
h.pwrite(data, 4096, nbd.CMD_FLAG_FUA)
assert other.pread(65536, 4096) == data, "connections see the same"
assert status(0, 1 << 20) == [4096, HOLE, 65536, DATA, (1 << 20) - 69632, HOLE]
assert status(0, 1 << 20, nbd.CMD_FLAG_REQ_ONE) == [4096, HOLE]

h.trim(8192, 8192, nbd.CMD_FLAG_FUA)
assert other.pread(8192, 8192) == bytes(8192)
assert status(4096, 16384) == [4096, DATA, 8192, HOLE, 4096, DATA]

h.zero(4096, 20480)
assert status(20480, 4096) == [4096, HOLE], "zeroes take nothing"
h.zero(4096, 20480, nbd.CMD_FLAG_NO_HOLE)
assert status(20480, 4096) == [4096, DATA], "unless asked to"
assert h.pread(4096, 20480) == bytes(4096)
h.zero(4096, 24576, nbd.CMD_FLAG_FAST_ZERO)
h.zero(1000, 30000)
middle_of_pages = data[24904:25904] + bytes(1000) + data[26904:27904]
assert h.pread(3000, 29000) == middle_of_pages

assert len(chunks()) > 1, "holes are chunks of their own"
assert chunks(nbd.CMD_FLAG_DF) == [(0, nbd.READ_DATA, 24576)]

h.flush()
h.cache(65536, 0)
h.set_strict_mode(0)
refused(22, lambda: h.pread(1, SIZE))
refused(22, lambda: h.trim(2, SIZE - 1))
refused(28, lambda: h.pwrite(b"xx", SIZE - 1))
assert h.pread(1, 0) == bytes(1), "and all goes on"
h.shutdown()
other.shutdown()
