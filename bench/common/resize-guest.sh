#!/bin/busybox sh
# The first process of lab/resize's guests: the agent of Aquifer runs, and what comes by the serial port is done. A line is a tag and a command; what it says
# is followed by `<TAG STATUS`.
B=/bin/busybox
$B mkdir -p /proc /sys /tmp /run /dev
$B mount -t devtmpfs dev /dev
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t tmpfs -o size=8G tmp /tmp
$B mount -t tmpfs run /run
$B --install -s /bin
PATH=/bin
while read -r module parameters; do insmod "/modules/$module" $parameters; done < /modules/order
exec < /dev/ttyS0 > /dev/ttyS0 2>&1
stty -echo -onlcr
/bin/aquifer-guest run > /run/agent.log 2>&1 &

pattern() { # 16 MiB of programs
    for i in 1 2 3 4 5 6 7 8 9; do cat /bin/aquifer-guest /bin/churn /bin/busybox; done 2> /dev/null | head -c 16777216 > /run/pattern
    echo 3 > /proc/sys/vm/drop_caches
}
swap() { # its disk
    mkswap /dev/vda > /dev/null
    swapon /dev/vda
}
total() { # MemTotal in KiB; no other program is run for it
    while read -r key value unit; do [ "$key" = MemTotal: ] && echo "$value" && break; done < /proc/meminfo
}
samples() { # PERIOD: says, again and again, the time, and what there is of memory and swap
    while sleep "$1"; do
        now at
        while read -r key value unit; do
            case $key in
            MemTotal:) total=$value ;; MemAvailable:) available=$value ;; SwapTotal:) swap=$value ;; SwapFree:) free=$value ;;
            esac
        done < /proc/meminfo
        while read -r key value; do
            case $key in pswpin) in=$value ;; pswpout) out=$value ;; esac
        done < /proc/vmstat
        echo "sample $at $total $available $((swap - free)) $in $out"
    done
}
load() { # MIB RATE TIMES: fills so much tmpfs at so many MiB a second (0: as fast as it can), reads it so often, and gives it back
    now began
    i=0
    while [ $i -lt $(($1 / 16)) ]; do
        cat /run/pattern > "/tmp/load.$i" || return 1
        i=$((i + 1))
        now at
        [ "$2" -gt 0 ] && ahead=$((16000 * i / $2 - $(since "$began" "$at"))) && [ $ahead -gt 0 ] && usleep $((ahead * 1000))
    done
    now filled
    for i in $(seq "$3"); do cat /tmp/load.* > /dev/null || return 1; done
    now read
    rm /tmp/load.*
    echo "load $began $filled $read"
}
since() { # SECONDS SECONDS: milliseconds from one to the other, both with two decimals
    echo $((${2%.*} * 1000 + 1${2#*.} * 10 - ${1%.*} * 1000 - 1${1#*.} * 10))
}
now() { # VARIABLE: seconds since boot
    read -r "$1" rest < /proc/uptime
}
echo "ready"
while read -r tag command; do
    eval "$command"
    echo "<$tag $?"
done
