#!/usr/bin/python3 -B
"""Measures how much slower unmodified programs run with part of their memory local ([Jo20] Fig. 6).

Each program has all its allocations in a region (`aquifer region exec --heap`). It first runs in
local RAM without a region, and then with a cache of 100 % down to 10 % of its footprint. The
footprint is the most that the region held at once when its cache had no limit. The lender is
`aquifer serve export` on this host, over a Unix socket. A program's result must be the same each
time.

    sort      GNU sort of 1.2 million lines
    sqlite    a table of 300,000 rows in memory, an index, joins and sums by it
    redis     60,000 values of 500 to 1,500 bytes, written, then read and compared in random order
    numpy     sort, FFT and products of arrays
    cc1       GCC's compiler proper on 400 generated functions, -O2
    zstd      compression of 16 MiB with a window of 16 MiB

Build first:
    cargo build --release --workspace --lib --bins

Usage: bench/programs.py [--rounds N] [--only NAME,...] [--picture FILE.png] [--json]
    (as root, on an otherwise idle machine)
"""

import hashlib
import random
import statistics
import subprocess
import threading
import time

from common import bench
from common.bench import AQUIFER, PYTHON, Failed, end
from common.lender import Lender

JEMALLOC = "libjemalloc.so.2"
PERCENT = [100, 80, 60, 40, 20, 10]
MIB = 512
# A run that takes more than this many times as long as the local one is stopped.
SLOWEST = 20
# The commands that have to be installed.
COMMANDS = {
    "sort": "sort", "sqlite": "sqlite3", "redis": "redis-server", "cc1": "gcc", "zstd": "zstd",
}

SQL = """
create table t(id integer primary key, a integer, b integer, c text);
insert into t with recursive n(i) as (select 1 union all select i + 1 from n where i < 300000)
    select i, (i * 7919) % 300007, (i * 104729) % 1009, printf('%064d', i * 31) from n;
create index ta on t(a);
create index tb on t(b);
select count(*), sum(x.id * y.a % 1000003) from t x join t y on x.a = y.id where x.b < 500;
select b, count(*), max(c) from t where a % 3 = 0 group by b order by 2 desc, 1 limit 5;
"""

NUMPY = """
import hashlib, numpy
numbers = numpy.random.RandomState(1).randint(0, 1 << 60, 6_000_000)
numbers.sort()
waves = numpy.fft.irfft(numpy.fft.rfft((numbers % 1009).astype(float)))
square = (numbers[:1_000_000] % 17).reshape(1000, 1000).astype(float)
digest = hashlib.sha256(numbers.tobytes()).hexdigest()
print(digest, round(float(waves.sum())), (square @ square.T @ square).sum())
"""


def c_source() -> str:
    functions = []
    for at in range(400):
        call = f" + f{at - 1}(p, n / 2)" if at else ""
        functions.append(
            f"int f{at}(int *p, int n) {{ int s = {at}; "
            f"for (int i = 0; i < n; i++) {{ switch (p[i] % 7) {{ "
            f"case 0: s += p[i] * {at % 13 + 2}; break; "
            f"case 1: s ^= p[i] << {at % 5 + 1}; break; "
            f"case 2: s -= p[(i * {at % 11 + 1}) % n]; break; "
            f"default: s = s * 31 + i; }} }} return s{call}; }}"
        )
    return "\n".join(functions)


class Prepared(Lender):
    """A lender, and a directory with the input of the programs."""

    def __init__(self) -> None:
        super().__init__("programs", MIB)
        try:
            self.prepare()
        except BaseException:
            self.close()
            raise

    def prepare(self) -> None:
        number = random.Random(1)
        lines = (f"{number.getrandbits(96):024x} {at}\n" for at in range(1_200_000))
        (self.dir / "lines").write_text("".join(lines))
        words = [f"{number.getrandbits(40):x}" for _ in range(4000)]
        (self.dir / "text").write_text(" ".join(number.choices(words, k=(16 << 20) // 11)))
        (self.dir / "sql").write_text(SQL)
        (self.dir / "many.c").write_text(c_source())

    def start(self, in_region: bool, command: list, **more) -> subprocess.Popen:
        if in_region:
            command = [AQUIFER, "region", "exec", "--heap", "heap", "--", *command]
        env = self.env() | {"LC_ALL": "C"} | ({} if in_region else {"LD_PRELOAD": JEMALLOC})
        return subprocess.Popen(command, env=env, start_new_session=True, **more)


class TooSlow(Exception):
    pass


def by_output(*command: str, stdin: str = "", output: str = ""):
    """A program that is measured until it ends. Its result is its output, or a file."""

    def run(lender: Prepared, in_region: bool, limit: float) -> tuple:
        words = [word.replace("DIR", str(lender.dir)) for word in command]
        given = open(lender.dir / stdin, "rb") if stdin else subprocess.DEVNULL
        began = time.monotonic()
        program = lender.start(in_region, words, stdin=given, stdout=subprocess.PIPE)
        try:
            said = program.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired as late:
            raise TooSlow from late
        finally:
            end(program)
        took = time.monotonic() - began
        if program.returncode:
            raise Failed(f"{words[0]} failed ({program.returncode})")
        if output:
            said = (lender.dir / output).read_bytes()
        return took, hashlib.sha256(said).hexdigest()

    return run


def redis_set(key: int, value: bytes) -> bytes:
    head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%d\r\n" % (len(str(key)), key)
    return head + b"$%d\r\n%s\r\n" % (len(value), value)


def redis_get(key: int) -> bytes:
    return b"*2\r\n$3\r\nGET\r\n$%d\r\n%d\r\n" % (len(str(key)), key)


def redis_value(key: int) -> bytes:
    text = hashlib.sha256(b"%d" % key).hexdigest().encode() * 24
    return text[: 500 + key * 7919 % 1001]


def redis(lender: Prepared, in_region: bool, limit: float) -> tuple:
    """Writes and reads values with a client of this script's own, 32 requests at a time."""
    path = lender.dir / "redis"
    command = [
        "redis-server", "--save", "", "--port", "0", "--unixsocket", str(path),
        "--dir", str(lender.dir), "--loglevel", "warning",
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    program = lender.start(in_region, command, **quiet)
    try:
        client = bench.connect(path)
        client.settimeout(limit)
        replies = client.makefile("rb")
        values = [redis_value(key) for key in range(60_000)]
        order = list(range(len(values)))
        random.Random(2).shuffle(order)
        wrong, began = 0, time.monotonic()
        for first in range(0, len(order), 32):
            keys = order[first:first + 32]
            client.sendall(b"".join(redis_set(key, values[key]) for key in keys))
            for _ in keys:
                wrong += replies.readline() != b"+OK\r\n"
        random.Random(3).shuffle(order)
        for first in range(0, len(order), 32):
            keys = order[first:first + 32]
            client.sendall(b"".join(map(redis_get, keys)))
            for key in keys:
                length = int(replies.readline()[1:])
                wrong += replies.read(length + 2)[:-2] != values[key]
            if time.monotonic() - began > limit:
                raise TooSlow
        return time.monotonic() - began, f"{wrong} wrong"
    except TimeoutError as late:
        raise TooSlow from late
    finally:
        end(program)


def programs() -> dict:
    bench.require("gcc")
    compiler = bench.run("gcc", "-print-prog-name=cc1").strip()
    compress = ["--single-thread", "-9", "--long=24", "-q", "-f", "DIR/text", "-o", "DIR/text.zst"]
    compile_ = ["-quiet", "-O2", "DIR/many.c", "-o", "DIR/many.s"]
    return {
        "sort": by_output("sort", "--parallel=1", "-S", "300M", "DIR/lines"),
        "sqlite": by_output("sqlite3", ":memory:", stdin="sql"),
        "redis": redis,
        "numpy": by_output(PYTHON, "-c", NUMPY),
        "cc1": by_output(compiler, *compile_, output="many.s"),
        "zstd": by_output("zstd", *compress, output="text.zst"),
    }


def footprint(lender: Prepared, run) -> int:
    """Returns the most that the program has in a region at once."""
    most, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.1):
            most = max(most, lender.show("heap")["usage"]["resident"])

    lender.create("heap", MIB, MIB << 10)
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        run(lender, True, 600)
    finally:
        ended.set()
        watching.join()
        lender.remove("heap")
    return most


def slowdown(lender: Prepared, name: str, run, cache_kib: int, local: float, expected) -> float:
    """Runs a program in a region, and compares its time with that in local RAM."""
    lender.create("heap", MIB, cache_kib)
    try:
        took, result = run(lender, True, SLOWEST * local)
    except TooSlow:
        return float(SLOWEST)
    finally:
        lender.remove("heap")
    if result != expected:
        raise Failed(f"{name} with a cache of {cache_kib} KiB: another result")
    return took / local


def measure(lender: Prepared, name: str, run, rounds: int) -> dict:
    size = footprint(lender, run)
    slower: dict = {percent: [] for percent in PERCENT}
    seconds = []
    for _ in range(rounds):
        local, result = run(lender, False, 600)
        seconds.append(local)
        for percent in PERCENT:
            cache_kib = (size * percent // 100) >> 10
            slower[percent].append(slowdown(lender, name, run, cache_kib, local, result))
            if slower[percent][-1] >= SLOWEST:
                break
    return {
        "footprint_mib": size >> 20,
        "local_s": statistics.median(seconds),
        "slowdown": {
            str(percent): statistics.median(runs) for percent, runs in slower.items() if runs
        },
    }


def report(table: dict) -> None:
    head = "".join(f"{percent:>7} %" for percent in PERCENT)
    print(f"{'program':<9}{'footprint':>10}{'local':>9}   {head}   local: times as long")
    for name, row in table.items():
        times = ""
        for percent in PERCENT:
            of = row["slowdown"].get(str(percent), SLOWEST)
            times += f"{of:>9.2f}" if of < SLOWEST else f"{f'> {SLOWEST}':>9}"
        print(f"{name:<9}{row['footprint_mib']:>6} MiB{row['local_s']:>7.2f} s   {times}")


def draw(table: dict, file: str) -> None:
    from common import picture

    title = "Real programs with a part of their memory in local RAM ([Jo20] Fig. 6)"
    figure, [[panel]] = picture.panels(title, 1, width=8, height=5)
    for at, (name, row) in enumerate(table.items()):
        points = [(int(percent), of) for percent, of in row["slowdown"].items() if of < SLOWEST]
        panel.plot(
            *zip(*points), marker=picture.MARKERS[at], color=picture.COLOURS[at],
            label=f"{name} ({row['footprint_mib']} MiB)",
        )
    panel.set_yscale("log")
    panel.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    panel.invert_xaxis()
    panel.set_xticks(PERCENT)
    panel.set_xlabel("% of the footprint in local RAM; the rest is with a lender")
    panel.set_ylabel("times as long as in local RAM alone")
    panel.legend()
    picture.save(figure, file)


def main() -> None:
    parser = bench.arguments(__doc__, rounds=1, picture=True)
    parser.add_argument("--only", metavar="NAME,...", help="these programs only")
    args = bench.parse(parser)
    known = programs()
    names = args.only.split(",") if args.only else list(known)
    if unknown := set(names) - known.keys():
        raise Failed(f"no program {', '.join(unknown)}; known: {', '.join(known)}")
    bench.require(*(COMMANDS[name] for name in names if name in COMMANDS))
    lender = Prepared()
    try:
        table = {}
        for name in names:
            table[name] = measure(lender, name, known[name], args.rounds)
            bench.note(f"{name}: {table[name]['slowdown']}")
    finally:
        lender.close()
    if args.picture:
        draw(table, args.picture)
    bench.finish(table, report)


if __name__ == "__main__":
    bench.start(main)
