#!/usr/bin/python3 -B
"""Measures memcached with a sixth of its memory local, beside all local ([Lim12] Figs. 9 and 10).

From the paper: a sixth of the memory is local (1 GB of 6), values have 6.4 KB on average, their sum
is 5.1/6 of the memory, the server runs alone, and clients get one value at a time. After a miss the
client writes the value. Ours: all is smaller (576 MiB, of which 96 MiB local). The paper replays
Wikipedia's trace of January 2008; here the keys follow Zipf's law with exponent 1, and lie in
memory in random order. Sizes are log-normal about their mean (sigma 1, 64 to 65,536 bytes).

Both servers run throughout, and take turns. The clients are Python processes with a connection
each. A client sends a request, waits for the answer, and compares every byte of it. The time of a
request is from the send to the whole answer. The comparison is not in it, but it limits the
throughput, and is given as the client's own time. Only memcached's items are in the region.
Target: at least 0.95 of the throughput. Build first:
    cargo build --release --workspace --lib --bins

Usage: bench/memcached_zipf.py [--rounds N] [--requests N] [--exponent F] [--clients N] [--off]
    [--tcp | --link TIME] [--picture FILE.png] [--json]
    (as root, on an otherwise idle machine)
"""

import array
import gc
import itertools
import math
import multiprocessing
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import bench
from common.bench import AQUIFER, Failed, end, note
from common.lender import Lender

MIB = 576
LOCAL = MIB // 6
MEAN = 6400
SIGMA = 1.0
LONGEST = 65536
SAMPLES = 300
QUANTILES = {"p50_us": 0.5, "p90_us": 0.9, "p99_us": 0.99, "p999_us": 0.999}


class Values:
    """The value of each key, all of which follows from the key's number."""

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
        ranks = range(1, len(self.by_rank) + 1)
        weights = list(itertools.accumulate(1 / rank ** exponent for rank in ranks))
        return random.Random(seed).choices(self.by_rank, cum_weights=weights, k=requests)


class Connection:
    def __init__(self, path: Path):
        self.socket = bench.connect(path)

    def get(self, key: int) -> bytes:
        """Returns the whole answer."""
        self.socket.sendall(b"get %d\r\n" % key)
        answer = self.socket.recv(LONGEST * 2)
        while not answer.endswith(b"END\r\n"):
            more = self.socket.recv(LONGEST * 2)
            if not more:
                raise Failed("memcached closed the connection")
            answer += more
        return answer

    def set(self, key: int, value: bytes) -> None:
        self.socket.sendall(b"set %d 0 0 %d\r\n%b\r\n" % (key, len(value), value))
        said = self.socket.recv(100)
        if said != b"STORED\r\n":
            raise Failed(f"memcached answers {said!r}")


class Server:
    """memcached, with its items in a region or not."""

    def __init__(self, lender: Lender, name: str, region: Path | None):
        self.socket, self.name = lender.dir / name, name
        command = ["memcached", "-u", "root", "-t", "2", "-m", str(MIB), "-s", self.socket]
        if region:
            command = [AQUIFER, "region", "exec", "--", *command, "-e", region]
        self.process = subprocess.Popen(
            command, env=lender.env(), start_new_session=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def load(self, values: Values) -> None:
        connection = Connection(self.socket)
        for key in range(len(values.lengths)):
            connection.set(key, values.value(key))


def client(server: Path, values: Values, trace: list, start, done) -> None:
    """Requests the keys of the trace. Sends through `done` the time of each request in ns, and the
    numbers of wrong and of missing values."""
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
        arguments = (server.socket, values, trace, start, there)
        process = multiprocessing.Process(target=client, args=arguments, daemon=True)
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
    times = sorted(took)
    at = {name: times[int((len(times) - 1) * share)] / 1e3 for name, share in QUANTILES.items()}
    return at | {
        "mean_us": sum(took) / len(took) / 1e3, "own_us": own / len(took),
        "per_s": len(took) / longest, "requests": len(took), "wrong": wrong, "missing": missing,
        "sorted": times,
    }


def remote_faults(lender: Lender) -> int:
    return lender.show("items")["counts"]["remote_faults"]


def without_fetch(lender: Lender, server: Server, trace: list) -> float:
    """Returns the share of requests, made one by one, that fetch no page."""
    connection, hits = Connection(server.socket), 0
    before = remote_faults(lender)
    for key in trace:
        connection.get(key)
        now = remote_faults(lender)
        hits += now == before
        before = now
    return hits / len(trace)


def run(lender: Lender, beside: Lender | None, args) -> dict:
    """Measures all servers. `beside` is the lender of the server without prefetch, if wanted."""
    values, servers = Values(), []
    lenders = {"local": lender, "region": lender} | ({"off": beside} if beside else {})
    try:
        for name, of in lenders.items():
            more = ("--prefetch", "off") if name == "off" else ()
            region = None
            if name != "local":
                region = of.create("items", MIB, LOCAL << 10, args.link, more)
            servers.append(Server(of, name, region))
            servers[-1].load(values)
            note(f"{name}: loaded")
        rounds: dict = {server.name: [] for server in servers}
        for number in range(args.rounds + 1):
            traces = [
                values.trace(number * 100 + of, args.exponent, args.requests // args.clients)
                for of in range(args.clients)
            ]
            for server in servers if number % 2 else servers[::-1]:
                before = remote_faults(lenders[server.name])
                measured = measure(server, values, traces)
                fetched = remote_faults(lenders[server.name]) - before
                measured["fetches"] = fetched / measured["requests"]
                # The first round warms up the cache.
                if number:
                    rounds[server.name].append(measured)
            note(f"round {number} of {args.rounds}")
        hits = without_fetch(lender, servers[1], values.trace(-1, args.exponent, SAMPLES))
        return {
            "keys": len(values.lengths), "mean_bytes": values.mean, "rounds": rounds,
            "no_fetch": hits, "region": lender.show("items"),
        }
    finally:
        for server in servers:
            end(server.process)


def ratios(rounds: dict) -> dict:
    """The throughput with the region beside that of the other servers, round by round."""
    return {
        name: bench.spread(
            one["per_s"] / other["per_s"] for other, one in zip(rounds[name], rounds["region"])
        )
        for name in rounds if name != "region"
    }


def draw(file: str, results: dict, way: str) -> None:
    from common import picture

    ratio = results["ratios"]["local"]["median"]
    title = f"memcached, {LOCAL} of {MIB} MiB local: {ratio:.2f} times the throughput of all local"
    figure, [[panel]] = picture.panels(title, 1, width=9, height=5)
    labels = {
        "local": "all local",
        "region": f"{LOCAL} MiB local, the rest {way}",
        "off": f"{LOCAL} MiB local, the rest {way}, without prefetch",
    }
    steps = [step / 2000 for step in range(1, 1998)] + [0.999 + step / 20000 for step in range(20)]
    for (name, rounds), colour in zip(results["rounds"].items(), picture.COLOURS):
        times = sorted(itertools.chain.from_iterable(of["sorted"] for of in rounds))
        panel.plot(
            [times[int(share * (len(times) - 1))] / 1e3 for share in steps],
            [100 * share for share in steps], color=colour, linewidth=2, label=labels[name],
        )
    panel.set(
        xscale="log", xlabel="a request takes at most (us)", ylabel="of requests (%)",
        ylim=(0, 101),
    )
    panel.grid(axis="x", which="both", color="#dddddd", linewidth=0.5)
    panel.legend(loc="lower right")
    picture.save(figure, file)


def report(results: dict) -> None:
    rounds = results["rounds"]
    requests = sum(of["requests"] for of in itertools.chain(*rounds.values()))
    print(
        f"{results['keys']} values of {results['mean_bytes']:.0f} bytes on average; {requests} "
        f"gets compared byte by byte, {results['wrong']} wrong"
    )
    print(
        f"{'':<8}{'gets/s':>9}{'p50 us':>9}{'p90 us':>9}{'p99 us':>9}{'p99.9 us':>10}"
        f"{'mean us':>9}{'client us':>11}{'missing':>9}"
    )
    for name, of in rounds.items():
        median = {key: statistics.median(one[key] for one in of) for key in of[0]}
        quantiles = "".join(f"{median[key]:9.1f}" for key in ("p50_us", "p90_us", "p99_us"))
        missing = 100 * median["missing"] / median["requests"]
        print(
            f"{name:<8}{median['per_s']:9.0f}{quantiles}{median['p999_us']:10.1f}"
            f"{median['mean_us']:9.1f}{median['own_us']:11.1f}{missing:7.2f} %"
        )
    fetches = statistics.median(of["fetches"] for of in rounds["region"])
    print(
        f"gets without a fetch: {100 * results['no_fetch']:.1f} % ({SAMPLES} made one by one); "
        f"fetches a get under load: {fetches:.2f}"
    )
    latency = results["region"]["latency"]
    print(
        f"a fetch: half within {latency['p50_us']:.0f} us, "
        f"99 % within {latency['p99_us']:.0f} us"
    )
    targets = {
        "local": ("throughput beside all local", 0.95), "off": ("beside --prefetch off", 0.97),
    }
    for name, of in results["ratios"].items():
        text, target = targets[name]
        print(f"{text}: {bench.spread_text(of)}; target: at least {target}")


def main() -> None:
    parser = bench.arguments(__doc__, rounds=5, picture=True)
    parser.add_argument(
        "--requests", type=int, default=100000, help="requests of a round, for each server"
    )
    parser.add_argument("--exponent", type=float, default=1.0, help="of Zipf's law")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument(
        "--link", metavar="TIME",
        help="an emulated link, one page at a time, instead of the lender (the paper's: 4us)",
    )
    parser.add_argument("--tcp", action="store_true", help="over loopback TCP, not a Unix socket")
    parser.add_argument(
        "--off", action="store_true", help="add a third server, with --prefetch off"
    )
    args = bench.parse(parser)
    bench.require("memcached")
    lender = Lender("zipf", MIB, args.tcp)
    beside = None
    try:
        beside = Lender("zipf-off", MIB, args.tcp) if args.off else None
        results = run(lender, beside, args)
    finally:
        lender.close()
        if beside:
            beside.close()
    results["ratios"] = ratios(results["rounds"])
    if args.picture:
        link = f"beyond an emulated link of {args.link} a page"
        draw(args.picture, results, link if args.link else "with a lender")
    rounds = list(itertools.chain(*results["rounds"].values()))
    for of in rounds:
        del of["sorted"]
    results["wrong"] = sum(of["wrong"] for of in rounds)
    bench.finish(results, report)
    if results["wrong"]:
        sys.exit(1)


if __name__ == "__main__":
    bench.start(main)
