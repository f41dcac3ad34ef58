#!/bin/busybox sh
# The first process of a guest of lab/groups: has memory that all guests have (numbers), and memory that none other has; says so, and waits.
/bin/busybox mkdir -p /proc /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox seq 1 100000000 | /bin/busybox head -c 50331648 >/same
/bin/busybox head -c 16777216 /dev/urandom >/own
echo "its memory is full" >/dev/console
while :; do /bin/busybox sleep 3600; done
