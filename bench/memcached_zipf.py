#!/usr/bin/python3 -B
"""memcached with a sixth of its memory here and the rest with a lender, beside memcached with all of it here (Disaggregation, Figs. 9 and 10).

From the paper: a sixth local (1 GB of 6), values of 6.4 KB on average, whose sum is 5.1/6 of the memory, a server for itself, gets one by one; who
misses writes the value. Ours: all of it smaller (576 MiB, of which 96 MiB local); the trace, which in the paper is Wikipedia's of January 2008: here
keys by Zipf's law with exponent 1, lying in memory in an order by chance; how sizes spread about their mean (log-normal, sigma 1, 64 to 65,536 bytes).
Both servers live through the whole run and are measured in turns. The clients are processes of Python with a connection each,
which send a request, wait for the answer, and then compare every byte of it; the time of a request is from send to the
whole answer, that of the comparison is not in it, but limits the throughput: it is given as the client's own time. Only memcached's items are in the region.
Wanted: at least 0.95 of the throughput.

Build first: cargo build --release --workspace --lib --bins

Usage: lab/zipf [--rounds N] [--requests N] [--exponent F] [--clients N] [--off] [--tcp | --link TIME] [--picture FILE.png] [--json]      (as root, on a machine that does nothing else)
"""

import argparse
import array
import gc
import itertools
import json
import math
import multiprocessing
import random
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from lender import AQUIFER, Lender, end

MIB = 576
LOCAL = MIB // 6
MEAN = 6400
SIGMA = 1.0
LONGEST = 65536
SAMPLES = 300
QUANTILES = {"p50_us": 0.5, "p90_us": 0.9, "p99_us": 0.99, "p999_us": 0.999}


class Values:
    """What is under each key; all of it follows from the key's number."""

    def __init__(self):
        chance = random.Random(1)
        self.noise = chance.randbytes(1 << 20)
        median = MEAN / math.exp(SIGMA ** 2 / 2)
        self.lengths, self.starts, total = [], [], 0
        while total < (MIB << 20) * 5.1 / 6:
            length = int(min(max(median * chance.lognormvariate(0, SIGMA), 64), LONGEST))
            self.lengths.append(length)
            self.starts.append(chance.randrange(len(self.noise) - LONGEST))
            total += length
        self.mean = total / len(self.lengths)
        self.by_rank = list(range(len(self.lengths)))
        chance.shuffle(self.by_rank)

    def value(self, key: int) -> bytes:
        start = self.starts[key]
        return b"%016x" % key + self.noise[start:start + self.lengths[key] - 16]

    def trace(self, seed: int, exponent: float, requests: int) -> list:
        weights = list(itertools.accumulate(1 / rank ** exponent for rank in range(1, len(self.by_rank) + 1)))
        return random.Random(seed).choices(self.by_rank, cum_weights=weights, k=requests)


class Connection:
    def __init__(self, path: Path):
        deadline = time.monotonic() + 10
        while True:
            self.socket = socket.socket(socket.AF_UNIX)
            try:
                self.socket.connect(str(path))
                return
            except OSError:
                self.socket.close()
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def get(self, key: int) -> bytes:
        """The whole answer."""
        self.socket.sendall(b"get %d\r\n" % key)
        answer = self.socket.recv(LONGEST * 2)
        while not answer.endswith(b"END\r\n"):
            more = self.socket.recv(LONGEST * 2)
            if not more:
                raise SystemExit("lab/zipf: memcached has closed the connection")
            answer += more
        return answer

    def set(self, key: int, value: bytes) -> None:
        self.socket.sendall(b"set %d 0 0 %d\r\n%b\r\n" % (key, len(value), value))
        said = self.socket.recv(100)
        if said != b"STORED\r\n":
            raise SystemExit(f"lab/zipf: memcached says {said!r}")


class Server:
    """memcached, with its items in a region or not."""

    def __init__(self, lab: Lender, name: str, region: Path | None):
        self.socket, self.name = lab.dir / name, name
        command = ["memcached", "-u", "root", "-t", "2", "-m", str(MIB), "-s", self.socket]
        if region:
            command = [AQUIFER, "region", "exec", "--", *command, "-e", region]
        self.process = subprocess.Popen(command, env=lab.env(), start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def load(self, values: Values) -> None:
        connection = Connection(self.socket)
        for key in range(len(values.lengths)):
            connection.set(key, values.value(key))


def client(server: Path, values: Values, trace: list, start, done) -> None:
    """Asks for what the trace says; hands over how long each request took (in ns), and what was wrong or not there."""
    connection, took, wrong, missing = Connection(server), array.array("Q"), 0, 0
    gc.disable()
    start.wait()
    began = time.perf_counter()
    for key in trace:
        sent = time.perf_counter_ns()
        answer = connection.get(key)
        took.append(time.perf_counter_ns() - sent)
        if answer == b"END\r\n":
            missing += 1
            connection.set(key, values.value(key))
        else:
            value = values.value(key)
            wrong += answer != b"VALUE %d 0 %d\r\n%b\r\nEND\r\n" % (key, len(value), value)
    done.send((time.perf_counter() - began, wrong, missing, took.tobytes()))


def measure(server: Server, values: Values, traces: list) -> dict:
    start = multiprocessing.Barrier(len(traces), timeout=60)
    clients = []
    for trace in traces:
        here, there = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=client, args=(server.socket, values, trace, start, there), daemon=True)
        process.start()
        there.close()
        clients.append((process, here))
    took, wrong, missing, longest, own = array.array("Q"), 0, 0, 0, 0
    for process, here in clients:
        seconds, bad, gone, times = here.recv()
        mine = array.array("Q", times)
        took += mine
        wrong, missing, longest = wrong + bad, missing + gone, max(longest, seconds)
        own += seconds * 1e6 - sum(mine) / 1e3
        process.join()
    ordered = sorted(took)
    at = {name: ordered[int((len(ordered) - 1) * share)] / 1e3 for name, share in QUANTILES.items()}
    return at | {"mean_us": sum(took) / len(took) / 1e3, "own_us": own / len(took), "per_s": len(took) / longest, "requests": len(took),
                 "wrong": wrong, "missing": missing, "sorted": ordered}


def without_fetch(lab: Lender, server: Server, trace: list) -> float:
    """Share of requests, made one by one, for which no page was fetched."""
    connection, hits = Connection(server.socket), 0
    before = lab.show("items")["counts"]["remote_faults"]
    for key in trace:
        connection.get(key)
        after = lab.show("items")["counts"]["remote_faults"]
        hits += after == before
        before = after
    return hits / len(trace)


def run(lab: Lender, beside: Lender | None, args) -> dict:
    values, servers = Values(), []
    try:
        for name, of in ({"local": lab, "region": lab} | ({"off": beside} if beside else {})).items():
            more = ("--prefetch", "off") if name == "off" else ()
            region = None if name == "local" else of.create("items", MIB, LOCAL << 10, args.link, more)
            servers.append(Server(of, name, region))
            servers[-1].load(values)
            say(f"{name}: loaded")
        rounds: dict = {server.name: [] for server in servers}
        for number in range(args.rounds + 1):
            traces = [values.trace(number * 100 + of, args.exponent, args.requests // args.clients) for of in range(args.clients)]
            for server in servers if number % 2 else servers[::-1]:
                before = lab.show("items")["counts"]["remote_faults"]
                measured = measure(server, values, traces)
                measured["fetches"] = (lab.show("items")["counts"]["remote_faults"] - before) / measured["requests"]
                # The first is for the cache to settle.
                if number:
                    rounds[server.name].append(measured)
            say(f"round {number} of {args.rounds}")
        hits = without_fetch(lab, servers[1], values.trace(-1, args.exponent, SAMPLES))
        return {"keys": len(values.lengths), "mean_bytes": values.mean, "rounds": rounds, "no_fetch": hits, "region": lab.show("items")}
    finally:
        for server in servers:
            end(server.process)


def say(what: str) -> None:
    if sys.stderr.isatty():
        print(what, file=sys.stderr)


def draw(file: str, results: dict, ratio: float, way: str) -> None:
    import picture

    figure, [[panel]] = picture.panels(f"memcached, {LOCAL} of {MIB} MiB local, beside all local: {ratio:.2f} times the throughput", 1, width=9, height=5)
    for (name, rounds), colour in zip(results["rounds"].items(), picture.COLOURS):
        all_of_them = sorted(itertools.chain.from_iterable(of["sorted"] for of in rounds))
        steps = [step / 2000 for step in range(1, 1998)] + [0.999 + step / 20000 for step in range(20)]
        panel.plot([all_of_them[int(share * (len(all_of_them) - 1))] / 1e3 for share in steps], [100 * share for share in steps], color=colour, linewidth=2,
                   label="all local" if name == "local" else f"{LOCAL} MiB local, the rest {way}" + (", without prefetch" if name == "off" else ""))
    panel.set(xscale="log", xlabel="a request takes at most (us)", ylabel="of requests (%)", ylim=(0, 101))
    panel.grid(axis="x", which="both", color="#dddddd", linewidth=0.5)
    panel.legend(loc="lower right")
    picture.save(figure, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=100000, help="of a round, for each server")
    parser.add_argument("--exponent", type=float, default=1.0)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--link", metavar="TIME", help="what if: not to the lender, but over an emulated link, one page at a time (the paper's: 4us)")
    parser.add_argument("--tcp", action="store_true", help="to the lender over loopback TCP, not a unix socket")
    parser.add_argument("--off", action="store_true", help="a third server, of whose region nothing is fetched before it is touched (--prefetch off)")
    parser.add_argument("--picture", metavar="FILE.png")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    lab = Lender("zipf", MIB, args.tcp)
    beside = None
    try:
        beside = Lender("zipf-off", MIB, args.tcp) if args.off else None
        results = run(lab, beside, args)
    finally:
        lab.close()
        if beside:
            beside.close()
    rounds = results["rounds"]
    ratios = [region["per_s"] / local["per_s"] for local, region in zip(rounds["local"], rounds["region"])]
    if args.picture:
        draw(args.picture, results, statistics.median(ratios), f"beyond an emulated link of {args.link} a page" if args.link else "with a lender")
    for of in itertools.chain(*rounds.values()):
        del of["sorted"]
    wrong = sum(of["wrong"] for of in itertools.chain(*rounds.values()))
    if args.json:
        print(json.dumps(results))
    else:
        report(args, results, ratios, wrong)
    if wrong:
        sys.exit(1)


def report(args, results: dict, ratios: list, wrong: int) -> None:
    rounds = results["rounds"]
    requests = sum(of["requests"] for of in itertools.chain(*rounds.values()))
    print(f"{results['keys']} values of {results['mean_bytes']:.0f} bytes on average, Zipf {args.exponent}; {requests} gets compared byte by byte, {wrong} wrong")
    print(f"{'':<8}{'gets/s':>9}{'p50 us':>9}{'p90 us':>9}{'p99 us':>9}{'p99.9 us':>10}{'mean us':>9}{'client us':>11}{'missing':>9}"
          f"   (medians of {args.rounds} rounds, {args.clients} clients)")
    for name, of in rounds.items():
        middle = {what: statistics.median(one[what] for one in of) for what in of[0]}
        print(f"{name:<8}{middle['per_s']:9.0f}" + "".join(f"{middle[what]:9.1f}" for what in ("p50_us", "p90_us", "p99_us"))
              + f"{middle['p999_us']:10.1f}{middle['mean_us']:9.1f}{middle['own_us']:11.1f}{100 * middle['missing'] / middle['requests']:7.2f} %")
    fetches = statistics.median(of["fetches"] for of in rounds["region"])
    print(f"gets without a fetch: {100 * results['no_fetch']:.1f} % ({SAMPLES} made one by one); fetches a get under load: {fetches:.2f}")
    latency = results["region"]["latency"]
    print(f"a fetch: half within {latency['p50_us']:.0f} us, 99 % within {latency['p99_us']:.0f} us")
    print(f"throughput beside all local: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}; wanted: at least 0.95)")
    if args.off:
        ratios = [region["per_s"] / off["per_s"] for off, region in zip(rounds["off"], rounds["region"])]
        print(f"beside --prefetch off: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}; wanted: at least 0.97)")


if __name__ == "__main__":
    main()
