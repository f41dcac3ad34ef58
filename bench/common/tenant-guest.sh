#!/bin/busybox sh
# The first process in the guests of two_tenants.py. It loads the balloon's driver, and becomes the
# load, which takes orders over the serial port. `seed` is on the kernel's command line.
B=/bin/busybox
$B mkdir -p /proc /dev
$B mount -t proc proc /proc
$B mount -t devtmpfs dev /dev
while read -r module parameters; do $B insmod "/modules/$module" $parameters; done < /modules/order
exec < /dev/ttyS0 > /dev/ttyS0 2>&1
$B stty -echo -onlcr
# Each chunk of the load's memory is a mapping of its own, so that the kernel frees it at once.
export MALLOC_MMAP_THRESHOLD_=65536
exec /bin/tenant "$seed"
