#!/bin/busybox sh
# The first process in the guests of page_sharing.py and consolidation.py. It fills memory with
# numbers that all guests have, and with data of its own. Then it reports that, and takes orders.
/bin/busybox mkdir -p /proc /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
# The kernel's command line is in the environment: `data` is the first number, or 0 for no data. One
# MiB of numbers becomes 48 different ones by other digits each time, which is quicker.
[ "${data:-1}" = 0 ] || {
	/bin/busybox seq "${data:-1}" 900000000 | /bin/busybox head -c 1048576 >/part
	digits=0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz
	at=0
	while [ $at -lt 48 ]; do
		/bin/busybox tr 0123456789 "${digits:$at:10}" </part
		at=$((at + 1))
	done >/same
	/bin/busybox head -c 16777216 /dev/urandom >/own
}
# Not by cat: with it, the kernel passes pages to /dev/null without reading them.
read_all() {
	/bin/busybox dd if="$1" of=/dev/null bs=64k 2>/dev/null
}
exec </dev/console >/dev/console 2>&1
[ -z "$churn" ] || {
	(while :; do read_all /same; /bin/busybox sleep 4; done) &
	exec /bin/churn "$churn" "$hot" "$rate" "$seed"
}
echo "its memory is full"
jobs=
while read -r order; do
	case $order in
	busy) for _ in 1 2; do (while :; do :; done) & jobs="$jobs $!"; done ;;
	walk) (while :; do read_all /same; read_all /own; done) & jobs="$jobs $!" ;;
	idle)
		for job in $jobs; do kill -9 "$job"; done
		jobs=
		;;
	esac
done
while :; do /bin/busybox sleep 3600; done
