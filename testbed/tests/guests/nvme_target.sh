# In a guest: Linux's initiator and nvme-cli use our target and check its answers.
# $1: whether this kernel can authenticate.
# The target serves 256 MiB on loopback; everything else is the kernel's and nvme-cli's.
set -e
port=4420
disk=/dev/nvme0n1
trap '[ $? = 0 ] || { dmesg | tail -n 40; tail -n 20 /tmp/errors; }' EXIT
. /bin/steps.sh

mkfifo /tmp/orders
serve() {
    rm -f /tmp/answers
    nvme_memory 127.0.0.1:$port 256M /tmp/store/lease "$@" \
        </tmp/orders >/tmp/answers 2>/tmp/errors &
    target=$!
    exec 3>/tmp/orders
    until_true test -s /tmp/answers
    subsystem=$(sed -n '1s/.* as //p' /tmp/answers)
}
stored() {
    before=$(wc -l </tmp/answers)
    echo stored >&3
    until_true answered
    tail -n 1 /tmp/answers | sed 's/ stored//'
}
answered() { [ "$(wc -l </tmp/answers)" -gt "$before" ]; }
resize() {
    before=$(wc -l </tmp/answers)
    echo "$1" >&3
    until_true answered
}
connect() {
    nvme connect -t tcp -a 127.0.0.1 -s $port -n "$subsystem" -i 2 -c 1 "$@" &&
        until_true test -b $disk
}
disconnect() { nvme disconnect -n "$subsystem" >/dev/null && until_true test ! -e $disk; }
has() { grep -q "$1" /tmp/out || { cat /tmp/out; fail "$2"; }; }
is_live() { [ "$(cat /sys/class/nvme/nvme0/state)" = live ]; }
has_sectors() { [ "$(cat /sys/block/nvme0n1/size)" = "$1" ]; }

mkdir -p /tmp/store /etc/nvme /run/nvme /mnt
mount -t tmpfs store /tmp/store
uuid=11111111-2222-3333-4444-555555555555
echo nqn.2014-08.org.nvmexpress:uuid:$uuid >/etc/nvme/hostnqn
echo $uuid >/etc/nvme/hostid
serve

step "discover"
nvme discover -t tcp -a 127.0.0.1 -s $port >/tmp/out
has "subnqn: *$subsystem" "discovery does not list the subsystem"
has "trsvcid: *$port" "discovery does not list the port"

step "connect-all"
nvme connect-all -t tcp -a 127.0.0.1 -s $port
# The discovery controller was nvme0.
until_true test -b /dev/nvme1n1
nvme disconnect-all
until_true test ! -e /dev/nvme1

step "identify data and logs"
connect
nvme list >/tmp/out; has "Aquifer lease" "nvme list does not show the namespace"
nvme id-ctrl /dev/nvme0 >/tmp/out
has "subnqn *: $subsystem" "the controller reports another subsystem"
nvme id-ns $disk >/tmp/out
has "lbads:12 rp:0 (in use)" "the block size is not 4096"
has "nsze *: 0x10000" "the namespace has the wrong size"
nvme ns-descs $disk >/tmp/out; has "uuid" "the namespace has no UUID"
nvme smart-log /dev/nvme0 >/tmp/out; has "available_spare.*100%" "the health log reports no spare"
nvme error-log /dev/nvme0 >/tmp/out
nvme fw-log /dev/nvme0 >/tmp/out
nvme effects-log /dev/nvme0 --csi 0 >/tmp/out
has "Get Log Page" "the effects log lacks Get Log Page"
nvme get-feature /dev/nvme0 -f 7 -H >/tmp/out; has "64" "the controller does not offer 64 queues"
nvme get-feature /dev/nvme0 -f 0x81 -l 16 -c 1 >/tmp/out
has "11 11 11 11 22 22" "the controller has the wrong host identifier"
nvme get-property /dev/nvme0 -o 0x1c >/tmp/out; has "value: 1" "the controller is not ready"

step "files"
mkfs.ext4 -q -F $disk
mount $disk /mnt
for number in 1 2 3 4 5 6 7 8; do
    dd if=/dev/urandom of=/mnt/$number bs=64k count=64 2>/dev/null
done
cp /bin/nvme_memory /bin/fio /mnt
(cd /mnt && sha256sum *[0-9y] fio) >/tmp/sums
umount /mnt
echo 3 >/proc/sys/vm/drop_caches
mount $disk /mnt
(cd /mnt && sha256sum -c /tmp/sums) >/dev/null || fail "the files have changed"
umount /mnt

step "discard"
[ "$(stored)" -gt $((32 << 20)) ] || fail "the files take too little RAM at the target"
discard --force $disk
[ "$(stored)" = 0 ] || fail "the discard left $(stored) bytes in the lease"
[ "$(du -s /tmp/store | cut -f 1)" -lt 64 ] || fail "the tmpfs still holds discarded pages"
cmp -n $((32 << 20)) $disk /dev/zero || fail "discarded blocks do not read as zeroes"

step "commands by hand"
dd if=/dev/urandom of=/tmp/data bs=4096 count=8 2>/dev/null
nvme write $disk -s 100 -c 7 -z 32768 -d /tmp/data >/dev/null
nvme compare $disk -s 100 -c 7 -z 32768 -d /tmp/data >/dev/null ||
    fail "written blocks do not compare equal"
if nvme compare $disk -s 101 -c 6 -z 28672 -d /tmp/data >/dev/null 2>&1; then
    fail "different blocks compare equal"
fi
nvme flush $disk -n 1 >/dev/null
nvme write-zeroes $disk -s 100 -c 3 -d >/dev/null
[ "$(stored)" = 16384 ] || fail "write-zeroes left $(stored) bytes in the lease, not 16384"
nvme dsm $disk -d -b 4 -s 104 >/dev/null
[ "$(stored)" = 0 ] || fail "dataset management freed too little RAM"
if nvme read $disk -s 65536 -c 0 -z 4096 -d /tmp/beyond >/dev/null 2>/tmp/out; then
    fail "a read beyond the end succeeded"
fi
has "LBA Out of Range" "a read beyond the end got another error"
discard --force --zeroout $disk
[ "$(stored)" = 0 ] || fail "zeroes take RAM"

step "resize"
resize 128M
until_true has_sectors 262144
resize 256M
until_true has_sectors 524288
disconnect

verify="fio --name=verify --filename=$disk --direct=1 --ioengine=psync --thread --numjobs=2
    --bsrange=4k-256k --bs_unaligned=0 --blockalign=4k --rw=randwrite --size=16M
    --offset_increment=64M --verify=crc32c --verify_fatal=1 --do_verify=1 --group_reporting
    --eta=never --output=/tmp/fio --randrepeat=0"
for digests in "" "-g -G"; do
    step "fio verify ${digests:-without digests}"
    # shellcheck disable=SC2086
    connect $digests >/dev/null
    $verify || { cat /tmp/fio; fail "fio found wrong data"; }
    disconnect
done

step "fio verify, with flow control"
connect --disable-sqflow >/dev/null
$verify || { cat /tmp/fio; fail "fio found wrong data"; }

step "resets under load"
(sleep 0.5; for _ in 1 2 3 4 5; do nvme reset /dev/nvme0 || exit 1; sleep 0.3; done) &
resets=$!
$verify --loops=4 || { cat /tmp/fio; fail "fio found wrong data after resets"; }
wait $resets || fail "a controller reset failed"
until_true is_live

step "the target restarts under load"
(sleep 1; kill -KILL $target) &
killer=$!
$verify --loops=4 &
fio=$!
wait $killer
serve
wait $fio || { cat /tmp/fio; fail "fio found wrong data after a restart"; }
until_true is_live
disconnect

step "100 connects and disconnects"
# Through the files that nvme-cli uses: under emulation nvme-cli takes most of a connection's time.
host="hostnqn=$(cat /etc/nvme/hostnqn),hostid=$uuid,nr_io_queues=2,reconnect_delay=1"
options="transport=tcp,traddr=127.0.0.1,trsvcid=$port,nqn=$subsystem,$host"
count=0
while [ $count -lt 100 ]; do
    echo "$options" >/dev/nvme-fabrics
    until_true test -b $disk
    echo 1 >/sys/class/nvme/nvme0/delete_controller
    until_true test ! -e $disk
    count=$((count + 1))
done
alone() { [ "$(ls /proc/$target/task | wc -l)" = 2 ]; }
until_true alone
echo "threads: $(ls /proc/$target/task | wc -l), descriptors: $(ls /proc/$target/fd | wc -l)"
[ "$(ls /proc/$target/fd | wc -l)" -lt 16 ] || fail "the target leaks file descriptors"

step "authentication"
kill -KILL $target
host_secret=$(nvme gen-dhchap-key -m 1 -n "$(cat /etc/nvme/hostnqn)")
controller_secret=$(nvme gen-dhchap-key -m 0)
other_secret=$(nvme gen-dhchap-key -m 0)
serve "$host_secret" "$controller_secret"
if nvme connect -t tcp -a 127.0.0.1 -s $port -n "$subsystem" -i 2 2>/dev/null; then
    fail "the target accepted a host without a secret"
fi
if [ "$1" = authenticates ]; then
    connect --dhchap-secret "$host_secret"
    dd if=$disk of=/dev/null bs=64k count=16 2>/dev/null || fail "an authenticated host cannot read"
    disconnect
    connect --dhchap-secret "$host_secret" --dhchap-ctrl-secret "$controller_secret"
    disconnect
    for wrong in "--dhchap-secret $other_secret" \
        "--dhchap-secret $host_secret --dhchap-ctrl-secret $other_secret"; do
        # shellcheck disable=SC2086
        if nvme connect -t tcp -a 127.0.0.1 -s $port -n "$subsystem" -i 2 $wrong 2>/dev/null; then
            fail "the connection succeeded with '$wrong'"
        fi
    done
fi
# On a busy machine emulated processors pause for long, and the kernel reports soft lockups.
if dmesg | grep -E "BUG:|WARNING:|Oops" | grep -v "soft lockup"; then
    fail "the kernel logged a bug or a warning"
fi
