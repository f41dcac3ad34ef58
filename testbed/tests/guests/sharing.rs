//! The experiment of \[Ge23\], Fig. 10, between machines: one is overloaded and the other helps,
//! then they switch roles.

use anyhow::Result;
use aquifer_api::status::Role;
use aquifer_page::Bytes;
use aquifer_testbed::{Host, Shell as _, Testbed, wait_until};

use crate::support::{Aquifer as _, Cluster, Load, TIMEOUT, member, step};

/// RAM of each host; the kernel and the initramfs leave about 250 MiB of it.
pub(crate) const HOST_MEMORY: Bytes = Bytes::mib(384);

/// Memory that a host keeps free for the process of a volume, which locks its memory, and for other
/// costs of borrowing.
const VOLUME_RESERVE: Bytes = Bytes::mib(100);

/// Memory that an overloaded host needs beyond its own. The surplus is well below the borrowed
/// amount: pages in write-out, and pages back in memory, take swap, too.
pub(crate) const SURPLUS: Bytes = Bytes::mib(28);

pub(crate) const SETTINGS: [&str; 4] = [
    "memory.period = '200ms'",
    "memory.upper = 0.5",
    "memory.lower = 0.35",
    "borrow.request = '64M'",
];

#[test]
fn two_hosts_swap_to_the_ram_of_the_other_in_turn() -> Result<()> {
    // A long timeout, so that no I/O fails on a busy machine.
    let settings = [&SETTINGS[..], &["borrow.io_timeout = '10m'"]].concat();
    Cluster::of(["a", "b"].map(|name| member(name).memory(HOST_MEMORY)))
        .settings(settings)
        .play(one_then_the_other)
}

/// Overloads `a`, which `b` helps, then the other way round.
pub(crate) fn one_then_the_other(hosts: &Testbed) -> Result<()> {
    let (a, b) = (&hosts["a"], &hosts["b"]);
    overload(a, b)?;
    overload(b, a)
}

/// Overloads `borrower`, which `lender` helps, until neither lends nor borrows.
fn overload(borrower: &Host, lender: &Host) -> Result<()> {
    let before = borrower.pages_swapped_out()?;
    let (first, second) = overloaded(borrower, &[lender], SURPLUS, 300)?;
    second.is_done()?;
    step("checking every page");
    let swapped = Bytes((borrower.pages_swapped_out()? - before) * 4096);
    assert!(swapped > Bytes::mib(16), "{swapped}");
    assert!(lender.lends()? > Bytes::mib(16), "{}", lender.lends()?);
    first.verify()?;
    second.verify()?;

    step(&format!("{swapped} swapped out; the loads end"));
    first.end()?;
    second.end()?;
    borrower.wait_until_it_is_free()?;
    lender.wait_until_it_is_free()
}

/// Starts two loads that together need more memory than `borrower` has; at least one of `lenders`
/// must help. The first load lifts the host over its threshold. The second fills the rest, swaps
/// `surplus`, and makes `accesses` random accesses.
pub(crate) fn overloaded(
    borrower: &Host,
    lenders: &[&Host],
    surplus: Bytes,
    accesses: u64,
) -> Result<(Load, Load)> {
    // Checking reads memory in order; 32 pages a request keep that short.
    borrower.sh("echo 5 >/proc/sys/vm/page-cluster")?;
    step(&format!("{borrower} is overloaded"));
    let first = Load::start(borrower, borrower.available()?.saturating_sub(VOLUME_RESERVE), 0)?;
    first.filled()?;
    step("the first load has filled its memory");
    borrower.wait_until_it_is(Role::Borrower)?;
    wait_until("the borrower has swap", TIMEOUT, || {
        Ok(borrower.sh("cat /proc/swaps")?.lines().count() > 1)
    })?;
    let mut helps = Vec::new();
    for lender in lenders {
        helps.extend((lender.status()?.role == Role::Lender).then(|| lender.name()));
    }
    assert!(!helps.is_empty(), "no host lends");
    step(&format!("{borrower} borrows from {}, and swaps", helps.join(" and ")));
    let second = Load::start(borrower, borrower.available()?.saturating_add(surplus), accesses)?;
    second.filled()?;
    step("both loads have filled their memory");
    Ok((first, second))
}
