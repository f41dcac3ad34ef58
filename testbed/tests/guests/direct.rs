//! A host swaps to another one by the kernel's own NVMe over Fabrics, with no process of ours on the way.

use anyhow::Result;
use aquifer_page::Bytes;
use aquifer_testbed::{Host, Kernel, Spec, Testbed};
use serde_json::Value;

use crate::support::{Aquifer as _, Load, aquifer, example, step};

const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:0a77de51-0000-4000-8000-00000000000a";
const SUBSYSTEM: &str = "nqn.2014-08.org.example:lent";

/// The kernel's target over 256 MiB of zram, for one host.
const LEND: &str = "set -e; cd /sys/kernel/config/nvmet; echo 256M >/sys/block/zram0/disksize; \
    mkdir subsystems/$NQN subsystems/$NQN/namespaces/1 hosts/$HOST ports/1; \
    ln -s /sys/kernel/config/nvmet/hosts/$HOST subsystems/$NQN/allowed_hosts/$HOST; \
    echo -n /dev/zram0 >subsystems/$NQN/namespaces/1/device_path; echo 1 >subsystems/$NQN/namespaces/1/enable; \
    echo tcp >ports/1/addr_trtype; echo ipv4 >ports/1/addr_adrfam; echo 10.77.0.2 >ports/1/addr_traddr; \
    echo 4420 >ports/1/addr_trsvcid; ln -s /sys/kernel/config/nvmet/subsystems/$NQN ports/1/subsystems/$NQN";

#[test]
fn of_kernel_6_1_swaps_over_nvme_tcp() -> Result<()> {
    swaps(Kernel::V6_1)
}

#[test]
fn of_kernel_6_12_swaps_over_nvme_tcp() -> Result<()> {
    swaps(Kernel::V6_12)
}

fn swaps(kernel: Kernel) -> Result<()> {
    let host = |name| Spec::new(name).kernel(kernel).file(aquifer(), "/bin/aquifer");
    let small = host("small").memory(Bytes::mib(224)).module("nvme-tcp");
    let small = small.file(example("device", "touch"), "/bin/checked-memory");
    let lender = host("lender").memory(Bytes::mib(512)).modules(["zram", "nvmet-tcp"]);
    let hosts = Testbed::start([small, lender])?;
    let (small, lender) = (&hosts["small"], &hosts["lender"]);
    lender.sh(&format!("NQN={SUBSYSTEM} HOST={HOST}; {LEND}"))?;
    let lent = format!("nvme+tcp://10.77.0.2:4420/{SUBSYSTEM}");
    step("refusals are explained");
    refused(
        small,
        &lent,
        "nqn.2014-08.org.nvmexpress:uuid:0a77de51-0000-4000-8000-00000000000b",
        "have the lender allow",
    )?;
    refused(small, &format!("{lent}x"), HOST, "check the NQN")?;
    refused(
        small,
        "nvme+tcp://10.77.0.2:4421/nqn.2014-08.org.example:x",
        HOST,
        "nobody serves NVMe over tcp",
    )?;
    refused(small, &lent.replace("tcp", "rdma"), HOST, "modprobe nvme-rdma")?;
    step("it is attached");
    swaps_to(small, &lent, || Ok(lender.sh("awk '{ print $1 }' /sys/block/zram0/mm_stat")?.trim().parse()?))
}

/// Attaches what is lent, has programs fill more memory than there is, checks it, and detaches.
fn swaps_to(host: &Host, lent: &str, stored: impl Fn() -> Result<u64>) -> Result<()> {
    // Checking reads memory from its beginning to its end; one request for 32 pages keeps that short.
    host.sh("echo 5 >/proc/sys/vm/page-cluster")?;
    let attach = format!("aquifer attach --direct --swap --patience forever --json --host-nqn {HOST} {lent}");
    let attached: Value = serde_json::from_str(&host.sh(&attach)?)?;
    let again = host.run(&attach)?;
    assert!(again.stderr.contains("already"), "{}", again.stderr);
    let device = attached["device"].as_str().unwrap_or_default();
    assert_eq!(attached["capacity"], 256 << 20);
    let swaps = host.sh("cat /proc/swaps")?;
    assert!(swaps.contains(device) && swaps.trim().ends_with("100"), "{swaps}");

    let load = Load::start(host, host.available()?.saturating_add(Bytes::mib(48)), 300)?;
    load.is_done()?;
    let swapped = Bytes(host.pages_swapped_out()? * 4096);
    let stored = Bytes(stored()?);
    step(&format!("{swapped} were swapped out, {stored} are stored; every page is checked"));
    assert!(swapped > Bytes::mib(32) && stored > Bytes::mib(16));
    load.verify()?;
    load.end()?;

    step("it is detached");
    host.sh(&format!("aquifer detach {device}"))?;
    assert_eq!(host.sh("cat /proc/swaps")?.lines().count(), 1);
    assert_eq!(host.sh("ls /sys/class/nvme /run/aquifer/direct")?.matches("nvme0").count(), 0);
    let complaints = host.run("dmesg | grep -E 'blocked for more|Out of memory|I/O error|swap-device'")?;
    assert!(!complaints.success(), "{}", complaints.stdout);
    Ok(())
}

fn refused(host: &Host, lent: &str, host_nqn: &str, help: &str) -> Result<()> {
    let output = host.run(&format!("aquifer attach --direct --host-nqn {host_nqn} {lent}"))?;
    assert_eq!(output.code, 1);
    assert!(output.stderr.contains(help), "{lent}: {}", output.stderr);
    assert_eq!(host.sh("ls /run/aquifer/direct")?, "");
    Ok(())
}
