# Functions for scripts that run in guests.
fail() { echo "FAILED: $*"; exit 1; }
# Prints the next step, and the seconds since the boot.
step() { echo "$(cut -d " " -f 1 /proc/uptime) $*"; }

# Waits until "$@" succeeds.
until_true() {
    tries=0
    until "$@"; do
        tries=$((tries + 1))
        [ $tries -lt 300 ] || fail "timed out waiting for: $*"
        sleep 0.1
    done
}
