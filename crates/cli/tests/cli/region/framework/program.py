import ctypes, mmap, os, random, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open(sys.argv[1], os.O_RDWR)
size = os.fstat(fd).st_size
memory = mmap.mmap(fd, size, mmap.MAP_SHARED)
all_pages = list(range(size // 4096))
def content(seed, page):
    return bytes(4096) if page % 64 == 7 else (b"%08d %08d." % (seed, page) * 256)[:4096]
print("ready", flush=True)
for line in sys.stdin:
    order, *numbers = line.split()
    numbers = [int(number) for number in numbers]
    wrong = 0
    first, count = numbers[1:] if order in ("write", "check") and numbers[1:] else (0, size // 4096)
    pages = all_pages[first:first + count]
    random.shuffle(pages)
    if order == "write":
        for page in pages:
            memory[page * 4096:page * 4096 + 4096] = content(numbers[0], page)
    elif order == "check":
        wrong = sum(memory[page * 4096:page * 4096 + 4096] != content(numbers[0], page)
                    for page in pages)
    elif order == "punch":
        first, count = numbers
        call = libc.fallocate64
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        wrong = call(fd, 3, first * 4096, count * 4096)
    elif order == "zero":
        first, count = numbers
        wrong = sum(memory[page * 4096:page * 4096 + 4096] != bytes(4096)
                    for page in range(first, first + count))
    elif order == "direct":
        with open(sys.argv[2], "wb") as disk:
            for page in range(len(all_pages)):
                disk.write(content(numbers[0], page))
        disk = os.open(sys.argv[2], os.O_RDONLY | os.O_DIRECT)
        reading = True
        def touch():
            while reading:
                memory[random.randrange(len(all_pages)) * 4096]
        toucher = threading.Thread(target=touch)
        toucher.start()
        view = memoryview(memory)
        for first in range(0, len(all_pages), 32):
            os.preadv(disk, [view[first * 4096:(first + 32) * 4096]], first * 4096)
        view.release()
        reading = False
        toucher.join()
    elif order == "fork":
        child = os.fork()
        if child == 0:
            try:
                memory[0]
            finally:
                os._exit(0)
        wrong = 0 if os.WIFSIGNALED(os.waitpid(child, 0)[1]) else 1
    print(order, wrong, flush=True)
