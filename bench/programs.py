#!/usr/bin/python3 -B
"""Real programs with a part of their memory here: how much slower they are (Migration, Fig. 6).

Each program, unmodified, has all that it allocates in a region (`aquifer region exec --heap`). First it runs with all of that in local RAM, in no region at all,
and then with a cache that holds so much of its footprint, from 100 % down to 10 %. The footprint is what the region had at most at a time where its cache was as
large as it. The lender is `aquifer export` on this host, over a unix socket. What a program works out must be the same each time.

    sort      GNU sort of 1.2 million lines
    sqlite    a table of 300,000 rows in memory, an index, joins and sums by it
    redis     60,000 values of 500 to 1,500 bytes written, then read back and compared, in an order by chance
    numpy     sort, FFT and products of arrays
    cc1       GCC's compiler proper on 400 generated functions, -O2
    zstd      compression of 16 MiB with a window of 16 MiB

Build first: cargo build --release --workspace --lib --bins

Usage: lab/programs [--rounds N] [--only NAME,...] [--picture FILE.png] [--json]      (as root, on a machine that does nothing else)
"""

import argparse
import hashlib
import json
import random
import socket
import statistics
import subprocess
import threading
import time

from lender import AQUIFER, Lender, end

JEMALLOC = "libjemalloc.so.2"
PERCENT = [100, 80, 60, 40, 20, 10]
MIB = 512
# A run that takes longer, in times of the local one, is ended: what is slower is not told apart.
SLOWEST = 20

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
print(hashlib.sha256(numbers.tobytes()).hexdigest(), round(float(waves.sum())), (square @ square.T @ square).sum())
"""


def c_source() -> str:
    lines = ["#include <stddef.h>"]
    for at in range(400):
        lines.append(f"int f{at}(int *p, int n) {{ int s = {at}; for (int i = 0; i < n; i++) {{ switch (p[i] % 7) {{ case 0: s += p[i] * {at % 13 + 2}; break; "
                     f"case 1: s ^= p[i] << {at % 5 + 1}; break; case 2: s -= p[(i * {at % 11 + 1}) % n]; break; default: s = s * 31 + i; }} }} "
                     f"return s{f' + f{at - 1}(p, n / 2)' if at else ''}; }}")
    return "\n".join(lines).replace("#include <stddef.h>\n", "")


class Lab(Lender):
    """A lender, a directory for what is measured, and what the programs work on."""

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
    """A program that is done when it ends, and whose result is what it says or leaves in a file."""

    def run(lab: Lab, in_region: bool, limit: float) -> tuple:
        words = [word.replace("DIR", str(lab.dir)) for word in command]
        given = open(lab.dir / stdin, "rb") if stdin else subprocess.DEVNULL
        began = time.monotonic()
        program = lab.start(in_region, words, stdin=given, stdout=subprocess.PIPE)
        try:
            said = program.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired as late:
            raise TooSlow from late
        finally:
            end(program)
        took = time.monotonic() - began
        if program.returncode:
            raise RuntimeError(f"{words[0]} ended with {program.returncode}")
        if output:
            said = (lab.dir / output).read_bytes()
        return took, hashlib.sha256(said).hexdigest()

    return run


def redis(lab: Lab, in_region: bool, limit: float) -> tuple:
    """Values written and read by a client of this script's own, 32 requests at a time."""
    path = lab.dir / "redis"
    program = lab.start(in_region, ["redis-server", "--save", "", "--port", "0", "--unixsocket", str(path), "--dir", str(lab.dir), "--loglevel", "warning"],
                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        client = socket.socket(socket.AF_UNIX)
        while True:
            try:
                client.connect(str(path))
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        client.settimeout(limit)
        replies = client.makefile("rb")
        value = lambda key: hashlib.sha256(b"%d" % key).hexdigest().encode() * 24
        value_of = [value(key)[: 500 + key * 7919 % 1001] for key in range(60_000)]
        order = list(range(len(value_of)))
        random.Random(2).shuffle(order)
        wrong, began = 0, time.monotonic()
        for first in range(0, len(order), 32):
            keys = order[first:first + 32]
            client.sendall(b"".join(b"*3\r\n$3\r\nSET\r\n$%d\r\n%d\r\n$%d\r\n%s\r\n" % (len(str(key)), key, len(value_of[key]), value_of[key]) for key in keys))
            for _ in keys:
                wrong += replies.readline() != b"+OK\r\n"
        random.Random(3).shuffle(order)
        for first in range(0, len(order), 32):
            keys = order[first:first + 32]
            client.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%d\r\n" % (len(str(key)), key) for key in keys))
            for key in keys:
                length = int(replies.readline()[1:])
                wrong += replies.read(length + 2)[:-2] != value_of[key]
            if time.monotonic() - began > limit:
                raise TooSlow
        return time.monotonic() - began, f"{wrong} wrong"
    except TimeoutError as late:
        raise TooSlow from late
    finally:
        end(program)


PROGRAMS = {
    "sort": by_output("sort", "--parallel=1", "-S", "300M", "DIR/lines"),
    "sqlite": by_output("sqlite3", ":memory:", stdin="sql"),
    "redis": redis,
    "numpy": by_output("/usr/bin/python3", "-c", NUMPY),
    "cc1": by_output("CC1", "-quiet", "-O2", "DIR/many.c", "-o", "DIR/many.s", output="many.s"),
    "zstd": by_output("zstd", "--single-thread", "-9", "--long=24", "-q", "-f", "DIR/text", "-o", "DIR/text.zst", output="text.zst"),
}


def footprint(lab: Lab, run) -> int:
    """The most that the program has of a region at a time."""
    most, ended = 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(0.1):
            most = max(most, lab.show("heap")["usage"]["resident"])

    lab.create("heap", MIB, MIB << 10)
    looking = threading.Thread(target=look)
    looking.start()
    try:
        run(lab, True, 600)
    finally:
        ended.set()
        looking.join()
        lab.remove("heap")
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default=",".join(PROGRAMS))
    parser.add_argument("--picture", metavar="FILE.png")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    compiler = subprocess.run(["gcc", "-print-prog-name=cc1"], check=True, capture_output=True, text=True).stdout.strip()
    PROGRAMS["cc1"] = by_output(compiler, "-quiet", "-O2", "DIR/many.c", "-o", "DIR/many.s", output="many.s")
    names, lab, table = args.only.split(","), Lab(), {}
    try:
        for name in names:
            run = PROGRAMS[name]
            size = footprint(lab, run)
            slower: dict = {percent: [] for percent in PERCENT}
            seconds = []
            for _ in range(args.rounds):
                local, result = run(lab, False, 600)
                seconds.append(local)
                for percent in PERCENT:
                    lab.create("heap", MIB, (size * percent // 100) >> 10)
                    try:
                        took, again = run(lab, True, SLOWEST * local)
                        if again != result:
                            raise RuntimeError(f"{name} at {percent} %: another result")
                        slower[percent].append(took / local)
                    except TooSlow:
                        slower[percent].append(float(SLOWEST))
                    finally:
                        lab.remove("heap")
                    if slower[percent][-1] >= SLOWEST:
                        break
            table[name] = {"footprint_mib": size >> 20, "local_s": statistics.median(seconds),
                           "slowdown": {percent: statistics.median(runs) for percent, runs in slower.items() if runs}}
            if not args.json:
                print_row(name, table[name], first=name == names[0])
    finally:
        lab.close()
    if args.json:
        print(json.dumps(table))
    if args.picture:
        draw(table, args.picture)


def print_row(name: str, row: dict, first: bool) -> None:
    if first:
        print(f"{'program':<9}{'footprint':>10}{'local':>9}   " + "".join(f"{percent:>7} %" for percent in PERCENT) + "   of it here: times as long")
    said = [f"{row['slowdown'][percent]:>9.2f}" if row["slowdown"].get(percent, SLOWEST) < SLOWEST else f"{f'> {SLOWEST}':>9}" for percent in PERCENT]
    print(f"{name:<9}{row['footprint_mib']:>6} MiB{row['local_s']:>7.2f} s   " + "".join(said), flush=True)


def draw(table: dict, file: str) -> None:
    import picture

    figure, [[panel]] = picture.panels("Real programs with a part of their memory in local RAM (Migration, Fig. 6)", 1, width=8, height=5)
    for at, (name, row) in enumerate(table.items()):
        points = [(percent, row["slowdown"][percent]) for percent in PERCENT if row["slowdown"].get(percent, SLOWEST) < SLOWEST]
        panel.plot(*zip(*points), marker=picture.MARKERS[at], color=picture.COLOURS[at], label=f"{name} ({row['footprint_mib']} MiB)")
    panel.set_yscale("log")
    panel.set_yticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    panel.invert_xaxis()
    panel.set_xticks(PERCENT)
    panel.set_xlabel("% of what the program has that may be in local RAM; the rest is with a lender")
    panel.set_ylabel("times as long as in local RAM alone")
    panel.legend()
    picture.save(figure, file)


if __name__ == "__main__":
    main()
