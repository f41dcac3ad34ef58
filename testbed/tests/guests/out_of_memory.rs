//! Tests in which a whole machine runs out of memory, with its swap on a volume of another host.
//! Nothing may hang, be killed or be lost. A memory cgroup would not do: the process on the swap
//! path must itself find memory when there is none.

use anyhow::{Context as _, Result, ensure};
use aquifer_hosts::daemon::EXPORT;
use aquifer_page::{Bytes, PAGE_SIZE};
use aquifer_testbed::{Host, Kernel, Shell as _, wait_until};

use crate::support::{Aquifer as _, Load, TIMEOUT, daemon, member, with_admitted};

#[test]
fn kernel_6_1_swaps_over_nbd_until_all_is_verified() -> Result<()> {
    runs_out_of_memory(Kernel::V6_1, "nbd")
}

#[test]
fn kernel_6_12_swaps_over_ublk_until_all_is_verified() -> Result<()> {
    runs_out_of_memory(Kernel::V6_12, "ublk")
}

#[test]
fn kernel_6_12_swaps_over_fuse_and_loop_until_all_is_verified() -> Result<()> {
    runs_out_of_memory(Kernel::V6_12, "fuse-loop")
}

/// The RAM that is left for the loads.
const LOAD_MEMORY: Bytes = Bytes::mib(20);

/// Makes all pages old, where the kernel has the multi-generational LRU. With that LRU, a process
/// that finds only young pages fails while another process ages them. After 16 such attempts the
/// kernel kills a process, before it has swapped out one page (`should_reclaim_retry` and
/// `try_to_inc_max_seq` of Linux 6.12). On emulated processors an attempt is short enough for that.
const AGE: &str = r#"
    if grep -q '[1-9]$' /sys/kernel/mm/lru_gen/enabled; then
        mount -t debugfs none /sys/kernel/debug 2>/dev/null
        pages=/sys/kernel/debug/lru_gen
        for _ in 1 2; do
            newest=$(awk '$1 == "memcg" { memcg = $2 } $1 == "node" { node = $2 }
                $1 ~ /^[0-9]+$/ { newest = $1 } END { print memcg, node, newest }' $pages)
            echo "+ $newest" >$pages
        done
    fi"#;

fn runs_out_of_memory(kernel: Kernel, backend: &str) -> Result<()> {
    // Little, but enough to unpack two copies of the programs for a moment: a debug build is large.
    let mut small = member("small").kernel(kernel).memory(Bytes::mib(192)).cpus(2);
    if backend == "ublk" {
        small = small.module("ublk_drv");
    }
    with_admitted([small, member("lender").memory(Bytes::mib(768))], |hosts| {
        let (small, lender) = (&hosts["small"], &hosts["lender"]);
        lender.spawn(&daemon(
            EXPORT,
            "1G --tls /etc/aquifer/tls --nbd 10.77.0.2:7071 --dir /dev/shm/aquifer/lender",
        ))?;
        wait_until("the lender listens", TIMEOUT, || {
            Ok(lender.run("netstat -ltn | grep :7071")?.success())
        })?;

        // A task that is blocked for so long hangs.
        small.sh("echo 60 >/proc/sys/kernel/hung_task_timeout_secs")?;
        // Checking reads memory in order; 32 pages a request keep that short.
        small.sh("echo 5 >/proc/sys/vm/page-cluster")?;
        let attach = format!(
            "aquifer volume attach --swap --backend {backend} --json --tls /etc/aquifer/tls \
             --lender-host lender nbds://10.77.0.2:7071/"
        );
        let volume: serde_json::Value = serde_json::from_str(&small.sh(&attach)?)?;

        // A file of the root file system, which the kernel cannot swap out, takes the rest: one
        // request takes about a millisecond on an emulated processor.
        let rest = small.available()?.saturating_sub(LOAD_MEMORY);
        small.sh(&format!("head -c {} /dev/zero >/rest", rest.0))?;

        // Two processes that together write and read three times as much as there is. The first
        // fits, and its pages are old when the second needs room.
        let available = Bytes(small.available()?.pages() * PAGE_SIZE as u64);
        let first = Load::start(small, available, 300)?;
        first.filled()?;
        small.sh(AGE)?;
        let loads = [first, Load::start(small, Bytes(2 * available.0), 300)?];
        loads.iter().try_for_each(Load::is_done)?;
        loads.iter().try_for_each(Load::verify)?;
        loads.into_iter().try_for_each(Load::end)?;

        let swapped = Bytes(small.pages_swapped_out()? * 4096);
        assert!(swapped > available, "the load swapped too little: {swapped}");
        assert_eq!(read_number(small, "awk '$1 == \"oom_kill\" { print $2 }' /proc/vmstat")?, 0);
        small.sh(&format!("kill -0 {}", volume["pid"]))?;
        // Check while the volume's log is there.
        nothing_failed(small)?;
        small.sh("aquifer volume detach --all")?;
        assert_eq!(small.sh("cat /proc/swaps")?.lines().count(), 1);
        nothing_failed(small)?;
        assert!(
            lender.lends()? <= Bytes::mib(32),
            "the lender must have its memory back: {}",
            lender.lends()?
        );
        Ok(())
    })
}

/// Checks that the kernel complains of no hung task, no lack of memory and no I/O error.
fn nothing_failed(host: &Host) -> Result<()> {
    let words = "blocked for more|Out of memory|I/O error|swap-device";
    let complaints = host.run(&format!("dmesg | grep -E '{words}'"))?;
    ensure!(!complaints.success(), "{}", complaints.stdout);
    Ok(())
}

fn read_number(host: &Host, command: &str) -> Result<u64> {
    let said = host.sh(command)?;
    said.trim().parse().with_context(|| format!("'{command}' says '{said}'"))
}
