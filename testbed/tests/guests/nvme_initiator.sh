#!/bin/sh
# In a guest: Linux's target serves a RAM disk and a file, and our initiator uses and checks them.
# Usage: nvme_initiator.sh authenticates|no
set -eu

host=nqn.2014-08.org.example:host
secret=DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:

ip link set lo up
[ -d /sys/kernel/config/nvmet ] || mount -t configfs none /sys/kernel/config
cd /sys/kernel/config/nvmet

# A port: $1 its number.
port() {
    mkdir "ports/$1"
    echo tcp > "ports/$1/addr_trtype"
    echo ipv4 > "ports/$1/addr_adrfam"
    echo 127.0.0.1 > "ports/$1/addr_traddr"
    echo "442$1" > "ports/$1/addr_trsvcid"
}

# A subsystem: $1 its name, $2 what it serves, $3 its port.
subsystem() {
    mkdir "subsystems/$1"
    mkdir "subsystems/$1/namespaces/1"
    echo "$2" > "subsystems/$1/namespaces/1/device_path"
    if [ -f "$2" ]; then echo 1 > "subsystems/$1/namespaces/1/buffered_io"; fi
    echo 1 > "subsystems/$1/namespaces/1/enable"
    ln -s "/sys/kernel/config/nvmet/subsystems/$1" "ports/$3/subsystems/$1"
}

port 0
subsystem nqn.2014-08.org.example:ram /dev/ram0 0
mkdir -p /tmp/backing && mount -t tmpfs none /tmp/backing
dd if=/dev/zero of=/tmp/backing/file bs=1M count=0 seek=48 2> /dev/null
subsystem nqn.2014-08.org.example:file /tmp/backing/file 0

ram=nvme+tcp://127.0.0.1:4420/nqn.2014-08.org.example:ram
file=nvme+tcp://127.0.0.1:4420/nqn.2014-08.org.example:file

# Nobody is let in whom the target does not know.
if nvme_check $ram $host 1 2> /tmp/refused; then echo "a stranger was let in"; exit 1; fi
grep -q "not allowed" /tmp/refused || { cat /tmp/refused; exit 1; }
mkdir hosts/$host
for name in ram file; do
    ln -s /sys/kernel/config/nvmet/hosts/$host subsystems/nqn.2014-08.org.example:$name/allowed_hosts/$host
done
if nvme_check ${ram}s $host 1 2> /tmp/refused; then echo "there is no such subsystem"; exit 1; fi
grep -q "no such subsystem" /tmp/refused || { cat /tmp/refused; exit 1; }

nvme_check $ram $host 2
nvme_check $ram $host 2 digests
nvme_check $file $host 2
nvme_check $file $host 2 digests

if [ "$1" = authenticates ]; then
    echo $secret > hosts/$host/dhchap_key
    if nvme_check $ram $host 1 2> /tmp/refused; then echo "a host without its secret was let in"; exit 1; fi
    grep -q "the target asks for it" /tmp/refused || { cat /tmp/refused; exit 1; }
    echo $secret > /tmp/secrets
    nvme_check $ram $host 1 /tmp/secrets
    echo 'hmac(sha384)' > hosts/$host/dhchap_hash
    echo $secret > hosts/$host/dhchap_ctrl_key
    echo $secret >> /tmp/secrets
    nvme_check $ram $host 1 digests /tmp/secrets
fi
