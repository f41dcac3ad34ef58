#!/bin/busybox sh
# The first process of a guest of lab/groups and lab/consolidation: has memory that all guests have (numbers), and memory that none other has; says so, and takes orders.
/bin/busybox mkdir -p /proc /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
# What the kernel's command line says is in the environment: with which number the data begins, if there is to be any. Of a MiB of numbers 48 are made, as that is
# quicker: with other digits each time.
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
# Not by cat, which has the kernel pass pages to /dev/null without a look at what is in them.
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
