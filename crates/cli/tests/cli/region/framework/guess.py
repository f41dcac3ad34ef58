import json, mmap, os, random, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(fd, os.fstat(fd).st_size, mmap.MAP_SHARED)
pages = list(range(len(memory) // 4096))
def content(seed, page):
    return (b"%d is a secret of %d." % (page, seed) * 256)[:4096]
print("ready", flush=True)
for line in sys.stdin:
    order, *seeds = line.split()
    random.shuffle(pages)
    if order == "fill":
        for page in pages:
            memory[page * 4096:page * 4096 + 4096] = content(int(seeds[page % 3]), page)
        print("fill 0", flush=True)
    elif order == "check":
        wrong = sum(memory[page * 4096:page * 4096 + 4096] != content(int(seeds[page % 3]), page)
                    for page in pages)
        print("check", wrong, flush=True)
    elif order == "guess":
        times = [[], [], []]
        now = time.perf_counter_ns
        for page in pages:
            at = page * 4096 + 4000
            began = now()
            memory[at] = 0
            times[page % 3].append(now() - began)
        print(json.dumps(times), flush=True)
