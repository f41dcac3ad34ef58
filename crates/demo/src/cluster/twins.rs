//! The step of two VMs of a group: their host's agent finds their equal pages, and keeps them once.

use aquifer_api::status::{GroupScanner, Status};
use aquifer_cli::failure::Result;
use aquifer_page::{Bytes, PAGE_SIZE};
use serde::Serialize;

use super::guest::Tally;
use super::stage::{HOSTS, Member};
use super::{Boot, Play, STEP, serial};
use crate::user::{Part, User};

/// The group, and its VMs.
const GROUP: &str = "blue";
const TWINS: [&str; 2] = ["blue-1", "blue-2"];

/// The memory of each VM, and what its program fills with the same content. Both VMs must leave
/// their host well below its threshold, or its agent would move one of them away.
const MEMORY: Bytes = Bytes::mib(160);
const HELD: Bytes = Bytes::mib(24);

/// Pages that the scanner compares per millisecond: it adapts to free CPU else, which a demo on
/// few processors lacks.
const RATE: &str = "20";

/// The figures of the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Shared {
    /// Pages of both VMs that were kept once.
    pub pages_shared: u64,
    /// The memory that this saved.
    pub bytes_saved: Bytes,
    /// Pages that a guest checked while they were shared, and after a write had unshared them.
    pub pages_verified: u64,
    /// Pages in parts of a guest's memory with a byte that differed.
    pub pages_wrong: u64,
}

impl Play<'_> {
    /// Runs two VMs of a group on the last host until they share pages. Then one guest writes new
    /// content to its pages, and both check all of theirs.
    pub(super) fn share(&self, boot: &Boot) -> Result<Shared> {
        self.progress.say("two VMs of a group run on one host".to_owned());
        let host = &self.stage.hosts[HOSTS.len() - 1];
        host.run(&["group", "create", GROUP, "--scan", RATE])?;
        self.watch.mark(host.name(), "two VMs of a group start");
        for twin in TWINS {
            host.run(&boot.words(twin, MEMORY, &MEMORY.0.to_string(), Some(GROUP)))?;
        }
        let meet = |twin| User::meet(&serial(host, twin), self.session.wait());
        let mut users = TWINS.iter().map(|twin| meet(twin)).collect::<Result<Vec<_>>>()?;
        users.iter_mut().try_for_each(|user| user.is_there().map(drop))?;
        let mut tally = Tally::default();
        hold(&mut users, [1, 1], &mut tally)?;
        let found = self.scanner(host)?;
        self.watch.mark(host.name(), "equal pages of both are kept once");
        for seeds in [[1, 1], [2, 1], [2, 1]] {
            hold(&mut users, seeds, &mut tally)?;
        }
        drop(users);
        for twin in TWINS {
            host.run(&["vm", "stop", twin, "--force"])?;
            host.run(&["vm", "rm", twin])?;
        }
        host.run(&["group", "rm", GROUP])?;
        let is_over = |status: Status| status.scanners.is_empty() && status.regions.is_empty();
        self.session.wait().until("ending the group's scanner", STEP, || {
            Ok(host.try_status().is_some_and(is_over).then_some(()))
        })?;
        Ok(Shared {
            pages_shared: found.shared.0 / PAGE_SIZE as u64,
            bytes_saved: found.saved,
            pages_verified: tally.verified,
            pages_wrong: tally.wrong,
        })
    }

    /// Waits until the scanner that the agent runs has found nearly all that the guests filled.
    fn scanner(&self, host: &Member) -> Result<GroupScanner> {
        self.progress.say("the host's agent looks for equal pages of the group".to_owned());
        self.session.wait().until("sharing equal pages", STEP, || {
            let scanners = host.try_status().map(|status| status.scanners).unwrap_or_default();
            let has_found = |scanner: &GroupScanner| {
                scanner.group.as_str() == GROUP
                    && scanner.by_agent
                    && scanner.saved >= HELD.scaled(0.9)
            };
            Ok(scanners.into_iter().find(has_found))
        })
    }
}

/// Lets both guests hold content of these seeds at the same time, and check every byte.
fn hold(users: &mut [User<'_>], seeds: [u64; 2], tally: &mut Tally) -> Result<()> {
    let part = |seed| Part { number: 0, seed };
    for (user, seed) in users.iter_mut().zip(seeds) {
        user.tell(part(seed), HELD)?;
    }
    for (user, seed) in users.iter_mut().zip(seeds) {
        *tally += Tally::of(&user.listen(part(seed), HELD)?);
    }
    Ok(())
}
