import hashlib, os, subprocess, sys, threading
def content(number):
    return hashlib.sha256(b"%d" % number).digest() * (number % 600)
blocks = []
print("ready", flush=True)
for line in sys.stdin:
    order, wrong = line.strip(), 0
    if order == "fill":
        fill = lambda: blocks.extend([(number, content(number)) for number in range(500)])
        threads = [threading.Thread(target=fill) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    elif order == "check":
        wrong = sum(block != content(number) for number, block in blocks)
    elif order == "free":
        blocks = blocks[::2]
    elif order == "child":
        command = ["/usr/bin/python3", "-c", "print(len([0] * 3000000))"]
        child = subprocess.run(command, stdout=subprocess.PIPE)
        wrong = int(child.stdout != b"3000000\n")
    elif order == "fork":
        try:
            wrong = os.fork() + 1
        except OSError:
            pass
    print(order, wrong, flush=True)
