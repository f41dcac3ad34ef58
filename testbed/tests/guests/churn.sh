#!/bin/busybox sh
# Process 1 of a guest that only checks and rewrites its memory, and reports that on its console.
/bin/busybox mount -t devtmpfs dev /dev
while read -r module parameters; do
    /bin/busybox insmod "/modules/$module" $parameters
done </modules/order
exec /bin/churn "$@" >/dev/ttyS0 2>&1
