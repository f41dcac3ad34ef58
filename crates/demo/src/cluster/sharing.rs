//! The act of two VMs of one group: their host's agent keeps their equal pages once.

use aquifer_api::group::Group;
use aquifer_api::path;
use aquifer_api::status::GroupScanner;
use aquifer_cli::failure::{OrFail, Result};
use aquifer_dedup::Sharing;
use aquifer_hosts::block_on;
use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use super::boot::{Boot, serial};
use super::guest::{Tally, Writer};
use super::stage::Member;
use super::{Play, STEP};
use crate::user::User;

/// The group of both VMs.
pub(super) const GROUP: &str = "blue";

/// The second VM, its memory, and what both guests fill with the same content.
const TWIN: &str = "web2";
const MEMORY: Bytes = Bytes::mib(128);
const EQUAL: Bytes = Bytes::mib(16);

/// Pages that the scanner compares per millisecond. Otherwise the rate follows the free CPU, and
/// emulated guests leave little.
const RATE: &str = "50";

/// So many passes of the scanner find all equal pages that guests no longer write: it looks at a
/// page that was calm for long in every eighth pass, and twice before it shares the page.
const PASSES: u64 = 10;

/// The figures of the act.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Shared {
    /// Memory of both VMs that the host kept once for several pages, in bytes.
    #[serde(rename = "shared_bytes")]
    pub shared: Bytes,
    /// The memory that this saved, in bytes.
    #[serde(rename = "saved_bytes")]
    pub saved: Bytes,
    /// Shared pages that became a VM's own again, because the first VM's guest wrote new content.
    #[serde(rename = "unshared_pages")]
    pub unshared: u64,
}

/// The part of the output of `aquifer group show --json` that the demo reads.
#[derive(Debug, Deserialize)]
struct Shown {
    sharing: Sharing,
}

impl Play<'_> {
    /// Creates the group on the first host. No lender of the demo shares pages, so each lease has a
    /// key of its own.
    pub(super) fn create_group(&self) -> Result<()> {
        let terms = ["--scan", RATE, "--encryption", "random"];
        self.first().run(&[&["group", "create", GROUP][..], &terms].concat())
    }

    /// Waits until all hosts have the group's agreement and key. Returns how many have it.
    pub(super) fn await_group(&self) -> Result<u64> {
        let hosts = &self.stage.hosts;
        self.session.wait().until("letting the group reach all hosts", STEP, || {
            let keys: Option<Vec<_>> = hosts.iter().map(key).collect();
            let keys = keys.filter(|keys| keys.windows(2).all(|pair| pair[0] == pair[1]));
            Ok(keys.map(|keys| keys.len() as u64))
        })
    }

    /// Starts a second VM beside the first, and lets both guests write the same content. When their
    /// pages are shared, both check theirs, also after one of them has written new content. Returns
    /// the second guest's pages too.
    pub(super) fn share(&self, boot: &Boot, guest: &mut Writer<'_>) -> Result<(Shared, Tally)> {
        let home = self.first();
        self.progress.say("a second VM of the group starts beside the first".to_owned());
        self.watch.mark(home.name(), "a second VM of the group starts");
        boot.create(home, TWIN, MEMORY)?;
        let twin = User::meet(&serial(home, TWIN), self.session.wait())?;
        // The first guest writes while the other boots.
        guest.pass_less(EQUAL)?;
        let mut twin = Writer::meet(twin, EQUAL)?;
        twin.copy(guest)?;
        self.progress.say("the agent's scanner finds the equal pages of both".to_owned());
        self.await_sharing(home)?;
        let before = shown(home)?;
        let saved = before.saved_bytes.0 >> 20;
        self.watch.mark(home.name(), format!("two VMs share pages: {saved} MiB saved"));
        guest.check()?;
        twin.check()?;
        guest.pass()?;
        twin.check()?;
        let after = shown(home)?;
        home.run(&["vm", "stop", TWIN, "--force"])?;
        home.run(&["vm", "rm", TWIN])?;
        guest.check()?;
        let shared = Shared {
            shared: before.shared_bytes,
            saved: before.saved_bytes,
            unshared: after.broken.saturating_sub(before.broken),
        };
        Ok((shared, twin.tally))
    }

    /// Waits until the scanner that the agent runs has seen all pages of both VMs again.
    fn await_sharing(&self, home: &Member) -> Result<()> {
        let mut first = None;
        self.session.wait().until("sharing equal pages", STEP, || {
            let scanners = home.try_status().map(|status| status.scanners).unwrap_or_default();
            let is_of_group = |scanner: &GroupScanner| {
                scanner.group.as_str() == GROUP && scanner.by_agent && scanner.regions == 2
            };
            let Some(scanner) = scanners.into_iter().find(is_of_group) else { return Ok(None) };
            let first = *first.get_or_insert(scanner.passes);
            let has_found = scanner.passes >= first + PASSES && scanner.saved >= EQUAL;
            Ok(has_found.then_some(()))
        })
    }
}

/// Returns the id of the group's key on a host; `None` if the host does not know the group.
fn key(host: &Member) -> Option<String> {
    let groups: Vec<Group> = block_on(host.client().get(path::GROUPS)).ok()?;
    groups.into_iter().find(|group| group.name.as_str() == GROUP).map(|group| group.key_id)
}

/// Returns the sharing of the group on a host.
fn shown(host: &Member) -> Result<Sharing> {
    let text = host.output(&["--json", "group", "show", GROUP])?;
    let shown: Shown = serde_json::from_slice(&text).or_fail(|| "reading 'aquifer group show'")?;
    Ok(shown.sharing)
}
