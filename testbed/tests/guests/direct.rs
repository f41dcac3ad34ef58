//! Swap to another host through the kernels' own NVMe over Fabrics at both ends, without a process
//! of Aquifer on the way.

use anyhow::{Context as _, Result};
use aquifer_hosts::daemon::EXPORT;
use aquifer_page::Bytes;
use aquifer_testbed::{Host, Kernel, Process, Shell as _, Spec, Testbed, wait_until};
use rustix::process::Signal;
use serde_json::Value;

use crate::support::{
    Aquifer as _, Load, SOFT_ROCE, TIMEOUT, aquifer, daemon, example, step, tool,
};

const SMALL_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:0a77de51-0000-4000-8000-00000000000a";
const OTHER_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:0a77de51-0000-4000-8000-00000000000b";

#[test]
fn of_kernel_6_1_swaps_over_nvme_tcp() -> Result<()> {
    let [small, lender] = hosts(Kernel::V6_1);
    let hosts = Testbed::start([small.module("nvme-tcp"), lender.module("nvmet-tcp")])?;
    let (small, lender) = (&hosts["small"], &hosts["lender"]);
    let export = Export::start(lender, "")?;
    refusals_are_explained(small, export.uri("tcp")?)?;
    swaps_to(small, export.uri("tcp")?, &export)?;
    export.ends()
}

#[test]
fn of_kernel_6_12_swaps_over_nvme_rdma() -> Result<()> {
    let [small, lender] = hosts(Kernel::V6_12);
    let [small, lender] =
        [small, lender].map(|host| host.modules(SOFT_ROCE).file(tool("rdma"), "/bin/rdma"));
    let hosts =
        Testbed::start([small.module("nvme-rdma"), lender.modules(["nvmet-tcp", "nvmet-rdma"])])?;
    hosts
        .hosts()
        .iter()
        .try_for_each(|host| host.sh("rdma link add rxe0 type rxe netdev eth0").map(drop))?;
    let (small, lender) = (&hosts["small"], &hosts["lender"]);
    let export = Export::start(lender, "--rdma")?;
    export.uri("tcp")?;
    swaps_to(small, export.uri("rdma")?, &export)?;

    step("the next export removes the leftovers of a killed one");
    export.process.signal(Signal::KILL);
    export.process.output(TIMEOUT)?;
    assert_eq!(
        lender.sh("ls /sys/kernel/config/nvmet/ports")?,
        "43264\n43265\n",
        "the kernel must still serve the export"
    );
    let next = Export::start(lender, "")?;
    assert_ne!(next.ready["nqn"], export.ready["nqn"]);
    assert_eq!(
        lender
            .sh("ls /sys/kernel/config/nvmet/ports /sys/kernel/config/nvmet/subsystems")?
            .matches("4326")
            .count(),
        1
    );
    assert_eq!(count_zrams(lender)?, 1);
    next.ends()
}

fn hosts(kernel: Kernel) -> [Spec; 2] {
    let host = |name| Spec::new(name).kernel(kernel).file(aquifer(), "/bin/aquifer");
    let small = host("small").memory(Bytes::mib(224));
    // zram starts without devices: the export makes its own.
    let lender = host("lender").memory(Bytes::mib(512)).module("zram num_devices=0");
    [small.file(example("blockdev", "touch"), "/bin/checked-memory"), lender]
}

/// `aquifer serve export --kernel` on a host, for `SMALL_NQN` alone.
struct Export<'a> {
    host: &'a Host,
    process: Process,
    ready: Value,
}

impl<'a> Export<'a> {
    fn start(host: &'a Host, more: &str) -> Result<Self> {
        let address = host.address();
        let words =
            format!("256M --json --kernel --nvme {address}:4420 --allow-host {SMALL_NQN} {more}");
        let process = host.spawn(&daemon(EXPORT, &words))?;
        let ready = serde_json::from_str(&process.wait_for("uris", TIMEOUT)?)?;
        Ok(Self { host, process, ready })
    }

    fn uri(&self, transport: &str) -> Result<&str> {
        let scheme = format!("nvme+{transport}://");
        let uris = self.ready["uris"].as_array().into_iter().flatten().filter_map(Value::as_str);
        uris.into_iter()
            .find(|uri| uri.starts_with(&scheme))
            .context("the export has no URI for this transport")
    }

    /// Returns the amount of stored data, and the RAM that it takes.
    fn stored(&self) -> Result<[Bytes; 2]> {
        let device = self.ready["device"].as_str().unwrap_or_default().trim_start_matches("/dev/");
        let text =
            self.host.sh(&format!("awk '{{ print $1, $3 }}' /sys/block/{device}/mm_stat"))?;
        let (data, ram) = text.trim().split_once(' ').context("zram reports no statistics")?;
        Ok([Bytes(data.parse()?), Bytes(ram.parse()?)])
    }

    /// Ends the export by ctrl-C, and checks that nothing is left.
    fn ends(self) -> Result<()> {
        step("the export ends");
        self.process.signal(Signal::INT);
        let end = self.process.output(TIMEOUT)?;
        assert!(end.success(), "{}", end.stderr);
        let nvmet = "/sys/kernel/config/nvmet";
        let left =
            self.host.sh(&format!("ls {nvmet}/subsystems; ls {nvmet}/ports; ls {nvmet}/hosts"))?;
        assert_eq!((left.as_str(), count_zrams(self.host)?), ("", 0));
        Ok(())
    }
}

fn count_zrams(host: &Host) -> Result<usize> {
    Ok(host.sh("ls /sys/block")?.matches("zram").count())
}

fn refusals_are_explained(host: &Host, uri: &str) -> Result<()> {
    step("refusals are explained");
    check_refusal(host, uri, OTHER_NQN, "on the lender, allow the host")?;
    check_refusal(host, &format!("{uri}x"), SMALL_NQN, "check the NQN")?;
    check_refusal(host, &uri.replace(":4420", ":4421"), SMALL_NQN, "no NVMe/tcp target listens")?;
    check_refusal(host, &uri.replace("+tcp", "+rdma"), SMALL_NQN, "modprobe nvme-rdma")?;
    host.sh("ip link set eth0 mtu 9000")?;
    check_refusal(host, &format!("--swap {uri}"), SMALL_NQN, "ip link set eth0 mtu 1500")?;
    host.sh("ip link set eth0 mtu 1500").map(drop)
}

fn check_refusal(host: &Host, target: &str, host_nqn: &str, part: &str) -> Result<()> {
    let output =
        host.run(&format!("aquifer volume attach --direct --host-nqn {host_nqn} {target}"))?;
    assert_eq!(output.code, 1);
    assert!(output.stderr.contains(part), "{target}: {}", output.stderr);
    let left = host.run("cat /run/aquifer/direct/* /sys/class/nvme/*/address")?;
    assert_eq!(left.stdout, "", "{target}");
    Ok(())
}

/// Attaches the export, fills more memory than the host has, checks the memory, and detaches.
fn swaps_to(host: &Host, uri: &str, export: &Export<'_>) -> Result<()> {
    step(&format!("{host} attaches {uri}"));
    // Checking reads memory in order; 32 pages a request keep that short.
    host.sh("echo 5 >/proc/sys/vm/page-cluster")?;
    let attach = format!(
        "aquifer volume attach --direct --swap --io-timeout forever --json \
         --host-nqn {SMALL_NQN} {uri}"
    );
    let attached: Value = serde_json::from_str(&host.sh(&attach)?)?;
    let again = host.run(&attach)?;
    assert!(again.stderr.contains("already"), "{}", again.stderr);
    let device = attached["device"].as_str().unwrap_or_default();
    assert_eq!(attached["capacity"], 256 << 20);
    let swaps = host.sh("cat /proc/swaps")?;
    assert!(swaps.contains(device) && swaps.trim().ends_with("100"), "{swaps}");

    let load = Load::start(host, host.available()?.saturating_add(Bytes::mib(32)), 300)?;
    load.is_done()?;
    let swapped = Bytes(host.pages_swapped_out()? * 4096);
    let [stored, ram] = export.stored()?;
    step(&format!("{swapped} swapped out, {stored} stored in {ram}; checking every page"));
    assert!(swapped > Bytes::mib(24) && stored > Bytes::mib(16));
    load.verify()?;
    load.end()?;

    step("detach");
    host.sh(&format!("aquifer volume detach {device}"))?;
    assert_eq!(host.sh("cat /proc/swaps")?.lines().count(), 1);
    assert_eq!(host.sh("ls /sys/class/nvme /run/aquifer/direct")?.matches("nvme0").count(), 0);
    wait_until("the export has freed the swapped pages", TIMEOUT, || {
        Ok(export.stored()?[0] <= Bytes::mib(1))
    })?;
    let complaints =
        host.run("dmesg | grep -E 'blocked for more|Out of memory|I/O error|swap-device'")?;
    assert!(!complaints.success(), "{}", complaints.stdout);
    Ok(())
}
