#!/bin/busybox sh
# The first process in the guests of resize.py and group_surplus.py. It runs Aquifer's agent, and
# the commands that come over the serial port. A line is a tag and a command; `<TAG STATUS` follows
# the command's output.
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

pattern() { # Makes a file of 16 MiB from programs.
    for i in 1 2 3 4 5 6 7 8 9; do cat /bin/aquifer-guest /bin/churn /bin/busybox; done \
        2> /dev/null | head -c 16777216 > /run/pattern
    echo 3 > /proc/sys/vm/drop_caches
}
swap() { # Swaps to the guest's disk.
    mkswap /dev/vda > /dev/null
    swapon /dev/vda
}
total() { # Prints MemTotal in KiB, without starting a program.
    while read -r key value unit; do
        [ "$key" = MemTotal: ] && echo "$value" && break
    done < /proc/meminfo
}
samples() { # PERIOD: prints the time, memory and swap once a period.
    while sleep "$1"; do
        now at
        while read -r key value unit; do
            case $key in
            MemTotal:) total=$value ;;
            MemAvailable:) available=$value ;;
            SwapTotal:) swap=$value ;;
            SwapFree:) free=$value ;;
            esac
        done < /proc/meminfo
        while read -r key value; do
            case $key in pswpin) in=$value ;; pswpout) out=$value ;; esac
        done < /proc/vmstat
        echo "sample $at $total $available $((swap - free)) $in $out"
    done
}
load() { # MIB RATE TIMES: fills tmpfs at RATE MiB a second (0: no limit), reads it, and removes it.
    now began
    i=0
    while [ $i -lt $(($1 / 16)) ]; do
        cat /run/pattern > "/tmp/load.$i" || return 1
        i=$((i + 1))
        now at
        [ "$2" -gt 0 ] && ahead=$((16000 * i / $2 - $(since "$began" "$at"))) &&
            [ $ahead -gt 0 ] && usleep $((ahead * 1000))
    done
    now filled
    for i in $(seq "$3"); do cat /tmp/load.* > /dev/null || return 1; done
    now read
    rm /tmp/load.*
    echo "load $began $filled $read"
}
since() { # SECONDS SECONDS: prints the milliseconds between; both have two decimals.
    echo $((${2%.*} * 1000 + 1${2#*.} * 10 - ${1%.*} * 1000 - 1${1#*.} * 10))
}
now() { # VARIABLE: sets it to the seconds since boot.
    read -r "$1" rest < /proc/uptime
}
echo "ready"
while read -r tag command; do
    eval "$command"
    echo "<$tag $?"
done
