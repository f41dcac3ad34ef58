# What scripts that run in guests are written with.
fail() { echo "FAILED: $*"; exit 1; }
# What comes next, and how many seconds after the boot.
step() { echo "$(cut -d " " -f 1 /proc/uptime) $*"; }

# Waits until "$@" succeeds.
until_true() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt 300 ] || fail "never: $*"
        sleep 0.1
    done
}
