#!/bin/busybox sh
# The first process of a guest of lab/groups: has memory that all guests have (numbers), and memory that none other has; says so, and takes orders.
/bin/busybox mkdir -p /proc /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox seq 1 100000000 | /bin/busybox head -c 50331648 >/same
/bin/busybox head -c 16777216 /dev/urandom >/own
exec </dev/console >/dev/console 2>&1
echo "its memory is full"
jobs=
while read -r order; do
	case $order in
	busy) for _ in 1 2; do (while :; do :; done) & jobs="$jobs $!"; done ;;
	walk) (while :; do /bin/busybox cat /same /own >/dev/null; done) & jobs="$jobs $!" ;;
	idle)
		for job in $jobs; do kill -9 "$job"; done
		jobs=
		;;
	esac
done
while :; do /bin/busybox sleep 3600; done
