//! Lenders that go away, for a while or for good.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use aquifer_page::Bytes;
use aquifer_testbed::{Host, Shell as _};

use crate::sharing::{HOST_MEMORY, SETTINGS, SURPLUS, overloaded};
use crate::support::{Aquifer as _, Cluster, member, step};

/// Several times as long as a client waits for an answer before it reconnects.
const OUTAGE: Duration = Duration::from_secs(30);

/// More accesses than a load can finish.
const ENDLESS_ACCESSES: u64 = 10_000_000;

#[test]
fn a_lender_whose_plug_is_pulled_is_named_and_nothing_hangs() -> Result<()> {
    let settings = [&SETTINGS[..], &["borrow.io_timeout = '20s'"]].concat();
    Cluster::of(["a", "b"].map(|name| member(name).memory(HOST_MEMORY))).settings(settings).play(
        |hosts| {
            let (a, b) = (&hosts["a"], &hosts["b"]);
            let (_first, second) = overloaded(a, &[b], SURPLUS, ENDLESS_ACCESSES)?;
            let lease = b.status()?.loans.lent[0].lease;
            step("b's plug is pulled");
            b.pull_plug()?;

            // The page that the load needs is lost for good, so the kernel kills the load: SIGBUS.
            assert_eq!(second.killed()?.code, 128 + 7);
            let volume = a.status()?.loans.borrowed.remove(0);
            let error = volume.last_error.unwrap_or_default();
            assert!(error.contains("lender b") && error.contains(&lease.to_string()), "{error:?}");
            // The rest of the host goes on.
            let asked = Instant::now();
            a.sh("ls / >/dev/null && touch /tmp/file && aquifer status")?;
            assert!(asked.elapsed() < Duration::from_secs(60), "{:?}", asked.elapsed());
            nothing_hangs(a)
        },
    )
}

#[test]
fn a_lender_whose_link_is_cut_is_waited_for_and_no_byte_is_lost() -> Result<()> {
    let settings = [&SETTINGS[..], &["borrow.io_timeout = '5m'"]].concat();
    Cluster::of(["a", "b"].map(|name| member(name).memory(HOST_MEMORY))).settings(settings).play(
        |hosts| {
            let (a, b) = (&hosts["a"], &hosts["b"]);
            let (first, second) = overloaded(a, &[b], SURPLUS, 5_000)?;
            step("b's link is cut for a while");
            b.cut();
            // Host a answers nothing meanwhile: every process that takes memory there waits.
            thread::sleep(OUTAGE);
            assert!(first.is_running() && second.is_running(), "a waiting load must not fail");
            step("b's link is mended");
            b.mend();

            second.is_done()?;
            second.verify()?;
            first.verify()?;
            assert!(b.lends()? > Bytes::ZERO);
            first.end()?;
            second.end()?;
            a.wait_until_it_is_free()?;
            b.wait_until_it_is_free()?;
            nothing_hangs(a)
        },
    )
}

/// Checks that no task was blocked for longer than the kernel's limit (two minutes).
fn nothing_hangs(host: &Host) -> Result<()> {
    let hung = host.run("dmesg | grep 'blocked for more than'")?;
    assert!(!hung.success(), "{}", hung.stdout);
    Ok(())
}
