#!/bin/sh
# In a guest: Linux's target serves RAM disks and a file, and our initiator uses and checks them.
# Usage: nvme_initiator.sh authenticates|no
set -eu

host=nqn.2014-08.org.example:host
secret=DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:

trap '[ $? = 0 ] || { dmesg | tail -n 40; cat /run/aquifer/volumes/*.log; }' EXIT
. /bin/steps.sh

ip link set lo up
[ -d /sys/kernel/config/nvmet ] || mount -t configfs none /sys/kernel/config
cd /sys/kernel/config/nvmet

# Makes a port: $1 its number.
port() {
    mkdir "ports/$1"
    echo tcp > "ports/$1/addr_trtype"
    echo ipv4 > "ports/$1/addr_adrfam"
    echo 127.0.0.1 > "ports/$1/addr_traddr"
    echo "442$1" > "ports/$1/addr_trsvcid"
}

# Makes a subsystem: $1 its name, $2 its device or file, $3 its port.
subsystem() {
    mkdir "subsystems/$1"
    mkdir "subsystems/$1/namespaces/1"
    echo "$2" > "subsystems/$1/namespaces/1/device_path"
    if [ -f "$2" ]; then echo 1 > "subsystems/$1/namespaces/1/buffered_io"; fi
    echo 1 > "subsystems/$1/namespaces/1/enable"
    give "$1" "$3"
}

# Offers a subsystem on a port, or withdraws it there, which disconnects its hosts: $1 the
# subsystem's name, $2 the port.
give() { ln -s "/sys/kernel/config/nvmet/subsystems/$1" "ports/$2/subsystems/$1"; }
take_away() { rm "ports/$2/subsystems/$1"; }

# Counts open connections to a port, both ends: $1 the port.
connections() { netstat -tn | grep -c ":442$1 .*ESTABLISHED"; }
is_used() { [ "$(connections 1)" -gt 1 ]; }
is_unused() { [ "$(connections "$1")" = 0 ]; }

step "unknown hosts, content, digests"
port 0
subsystem nqn.2014-08.org.example:ram /dev/ram0 0
mkdir -p /tmp/backing && mount -t tmpfs none /tmp/backing
dd if=/dev/zero of=/tmp/backing/file bs=1M count=0 seek=48 2> /dev/null
subsystem nqn.2014-08.org.example:file /tmp/backing/file 0

ram=nvme+tcp://127.0.0.1:4420/nqn.2014-08.org.example:ram
file=nvme+tcp://127.0.0.1:4420/nqn.2014-08.org.example:file

# The target must refuse an unknown host.
if nvme_check $ram $host 1 2> /tmp/refused; then fail "the target accepted an unknown host"; fi
grep -q "not allowed" /tmp/refused || { cat /tmp/refused; exit 1; }
mkdir hosts/$host
for name in ram file; do
    ln -s /sys/kernel/config/nvmet/hosts/$host \
        subsystems/nqn.2014-08.org.example:$name/allowed_hosts/$host
done
if nvme_check ${ram}s $host 1 2> /tmp/refused; then
    fail "the target accepted an unknown subsystem"
fi
grep -q "no such subsystem" /tmp/refused || { cat /tmp/refused; exit 1; }

nvme_check $ram $host 2
nvme_check $ram $host 2 digests
nvme_check $file $host 2
nvme_check $file $host 2 digests

step "100 connects and disconnects"
nvme_check $ram $host 100x
nvme_check $ram $host 100x digests
until_true is_unused 0

if [ "$1" = authenticates ]; then
    step "authentication"
    echo $secret > hosts/$host/dhchap_key
    if nvme_check $ram $host 1 2> /tmp/refused; then
        fail "the target accepted a host without its secret"
    fi
    grep -q "the target requires it" /tmp/refused || { cat /tmp/refused; exit 1; }
    echo $secret > /tmp/secrets
    nvme_check $ram $host 1 /tmp/secrets
    echo 'hmac(sha384)' > hosts/$host/dhchap_hash
    echo $secret > hosts/$host/dhchap_ctrl_key
    echo $secret >> /tmp/secrets
    nvme_check $ram $host 1 digests /tmp/secrets
fi

step "a volume"
zram=/sys/block/zram0
echo 128M > $zram/disksize
stored() { awk '{ print $1 }' $zram/mm_stat; }
volume=nqn.2014-08.org.example:volume
port 1
subsystem $volume /dev/zram0 1
echo 1 > subsystems/$volume/attr_allow_any_host
# Only this backend passes on checked-io's discards on both kernels.
disk=$(aquifer volume attach --backend fuse-loop --host-nqn $host nvme+tcp://127.0.0.1:4421/$volume)
checked-io "$disk" 50
[ "$(stored)" -gt $((2 << 20)) ] || fail "the namespace does not store the volume's data"
blkdiscard "$disk"
[ "$(stored)" -lt $((1 << 20)) ] || fail "the discard left $(stored) bytes in the namespace"

step "the subsystem disappears from its port and returns, under load"
until [ -e /tmp/enough ]; do
    checked-io "$disk" 50 && blkdiscard "$disk" || exit 1
done > /tmp/rounds 2>&1 &
rounds=$!
for pause in 0.1 0.3 0.5 1 2; do
    sleep 1
    until_true is_used
    take_away $volume 1
    sleep $pause
    give $volume 1
done
until_true is_used
touch /tmp/enough
wait $rounds || { cat /tmp/rounds; fail "I/O failed or returned wrong data"; }
cat /tmp/rounds
aquifer volume detach "$disk"

step "nothing is left"
until_true is_unused 1
for at in ports/*/subsystems/*; do rm "$at"; done
rm subsystems/*/allowed_hosts/*
rmdir ports/* hosts/* subsystems/*/namespaces/1 subsystems/*
# Refused while there is a queue.
until_true rmmod nvmet_tcp
rmmod nvmet
if dmesg | grep -E "BUG:|WARNING:|Oops|blocked for more" | grep -v "soft lockup"; then
    fail "the kernel logged a bug or a warning"
fi
