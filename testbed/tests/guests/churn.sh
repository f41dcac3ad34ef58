#!/bin/busybox sh
# The first process of a guest that does nothing but check and rewrite its memory, and says so on its console.
/bin/busybox mount -t devtmpfs dev /dev
while read -r module parameters; do
    /bin/busybox insmod "/modules/$module" $parameters
done </modules/order
exec /bin/churn "$@" >/dev/ttyS0 2>&1
