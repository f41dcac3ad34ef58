//! Agents that lend and borrow over NVMe over Fabrics, between machines with kernels of their own.
//! The tests repeat the experiment of \[Ge23\], Fig. 10, over TCP and RDMA, through Aquifer's
//! processes or the kernels themselves, and with three hosts.

use anyhow::Result;
use aquifer_api::status::Role;
use aquifer_page::Bytes;
use aquifer_testbed::{Host, Kernel, Shell as _, Spec, Testbed, wait_until};

use crate::sharing::{HOST_MEMORY, SETTINGS, one_then_the_other, overloaded};
use crate::support::{Aquifer as _, Cluster, Load, SOFT_ROCE, TIMEOUT, member, step, tool};

/// Lends over NVMe, from the agent's store or, with `FROM_KERNEL`, from the kernel's zram devices.
const FROM_STORE: &str = "lend.nvme = '{address}:4420'";
const FROM_KERNEL: [&str; 2] = [FROM_STORE, "lend.backend = 'kernel'"];

#[test]
fn two_hosts_share_over_nvme_tcp() -> Result<()> {
    let settings = with(&[FROM_STORE, "borrow.protocol = 'nvme-tcp'"]);
    let hosts = ["a", "b"].map(|name| member(name).memory(HOST_MEMORY));
    let cluster = Cluster::of(hosts).settings(settings);
    cluster
        .picture("sharing-nvme-tcp", "Two hosts share their RAM over NVMe/TCP")
        .play(one_then_the_other)
}

#[test]
fn two_kernels_share_over_rdma() -> Result<()> {
    let settings = with(&FROM_KERNEL);
    let settings = [&settings[..], &["lend.rdma = true"], &by_kernel("nvme-rdma")].concat();
    let hosts = ["a", "b"].map(|name| {
        let host =
            kernel_member(name, Kernel::V6_12).modules(SOFT_ROCE).file(tool("rdma"), "/bin/rdma");
        host.modules(["nvme-rdma", "nvmet-rdma"])
    });
    let cluster =
        Cluster::of(hosts).settings(settings).first("rdma link add rxe0 type rxe netdev eth0");
    cluster
        .picture("sharing-nvme-rdma", "Two hosts share their RAM over RDMA, by their kernels")
        .play(one_then_the_other)
}

#[test]
fn three_hosts_share_by_their_kernels_over_tcp() -> Result<()> {
    // Debian built neither end of this kernel with authentication.
    let settings = with(&FROM_KERNEL);
    let settings = [&settings[..], &["lend.secrets = false"], &by_kernel("nvme-tcp")].concat();
    let [a, b, c] = ["a", "b", "c"].map(|name| kernel_member(name, Kernel::V6_1));
    // A borrower finds most of its memory at a.
    let hosts = [a.memory(Bytes::mib(512)), b, c];
    let cluster = Cluster::of(hosts).settings(settings);
    cluster
        .picture("sharing-three", "Three hosts share their RAM over NVMe/TCP, by their kernels")
        .play(|hosts| {
            one_borrows_from_two(&hosts["a"], [&hosts["b"], &hosts["c"]])?;
            two_borrow_from_one(hosts, ["b", "c"], "a")
        })
}

/// Returns the common settings, followed by `more`.
fn with(more: &[&'static str]) -> Vec<&'static str> {
    // A long timeout, so that no I/O fails on a busy machine.
    [&SETTINGS[..], &["borrow.io_timeout = '10m'"], more].concat()
}

fn by_kernel(protocol: &'static str) -> [&'static str; 2] {
    let protocol = match protocol {
        "nvme-rdma" => "borrow.protocol = 'nvme-rdma'",
        _ => "borrow.protocol = 'nvme-tcp'",
    };
    ["borrow.attach = 'direct'", protocol]
}

/// Describes a host that lends and borrows through its kernel.
fn kernel_member(name: &str, kernel: Kernel) -> Spec {
    member(name)
        .kernel(kernel)
        .memory(HOST_MEMORY)
        .modules(["nvme-tcp", "nvmet-tcp"])
        .module("zram num_devices=0")
}

fn one_borrows_from_two(borrower: &Host, lenders: [&Host; 2]) -> Result<()> {
    step("one host borrows from two");
    // The borrower needs more than one lease holds. Emulated hosts fill memory faster than they
    // borrow, so the third load waits for room. A borrower asks for more once it uses three
    // quarters of its leases.
    let (first, second) = overloaded(borrower, &lenders, Bytes::mib(44), 300)?;
    wait_until("the borrower has a second lease", TIMEOUT, || {
        Ok(borrower.sh("cat /proc/swaps")?.lines().count() > 2)
    })?;
    let third = Load::start(borrower, Bytes::mib(60), 300)?;
    third.filled()?;
    second.is_done()?;
    third.is_done()?;
    let volumes = borrower.status()?.loans.borrowed;
    assert!(volumes.len() >= 2 && volumes.iter().all(|volume| volume.pid.is_none()), "{volumes:?}");
    for lender in lenders {
        assert_eq!(lender.status()?.role, Role::Lender, "{lender}");
        assert!(lender.lends()? > Bytes::mib(8), "{lender}: {}", lender.lends()?);
    }
    let loads = [first, second, third];
    loads.iter().try_for_each(Load::verify)?;
    loads.into_iter().try_for_each(Load::end)?;
    borrower.wait_until_it_is_free()?;
    lenders.iter().try_for_each(|lender| lender.wait_until_it_is_free())
}

fn two_borrow_from_one(hosts: &Testbed, borrowers: [&str; 2], lender: &str) -> Result<()> {
    step("two hosts borrow from one");
    let lender = &hosts[lender];
    let mut loads = Vec::new();
    for borrower in borrowers {
        loads.push(overloaded(&hosts[borrower], &[lender], Bytes::mib(24), 300)?);
    }
    wait_until("the lender lends to both", TIMEOUT, || Ok(lender.status()?.loans.lent.len() >= 2))?;
    for (first, second) in &loads {
        second.is_done()?;
        first.verify()?;
        second.verify()?;
    }
    for (first, second) in loads {
        first.end()?;
        second.end()?;
    }
    hosts.hosts().iter().try_for_each(|host| host.wait_until_it_is_free())
}
