#!/bin/busybox sh
# Process 1 of a guest that only checks and rewrites its memory, and reports that on its console. If
# the guest has a disk, it writes a block of it in each round, and reads that and an older one.
/bin/busybox mount -t devtmpfs dev /dev
while read -r module parameters; do
    /bin/busybox insmod "/modules/$module" $parameters
done </modules/order

block() {
    /bin/busybox yes "$1" | /bin/busybox head -c 65536
}

is_right() {
    block "$1" | /bin/busybox cmp -s - /block
}

read_block() {
    /bin/busybox dd if=/dev/vda of=/block bs=65536 skip=$(($1 % 64)) count=1 2>/dev/null
}

work_on_disk() {
    round=0 wrong=0
    while :; do
        round=$((round + 1))
        block $round | /bin/busybox dd of=/dev/vda bs=65536 iflag=fullblock seek=$((round % 64)) \
            conv=fsync,notrunc 2>/dev/null || wrong=$((wrong + 1))
        /bin/busybox blockdev --flushbufs /dev/vda
        older=$((round > 50 ? round - 50 : round))
        for number in $round $older; do
            read_block $number && is_right $number || wrong=$((wrong + 1))
        done
        echo "disk $round $wrong" >/dev/ttyS0
    done
}

[ -b /dev/vda ] && work_on_disk &
exec /bin/churn "$@" >/dev/ttyS0 2>&1
