//! `aquifer region limit`.

use std::fmt::Write as _;

use aquifer_page::{Bytes, Group};
use aquifer_region::process::{Limits, client};
use clap::Args;

use super::directory;
use crate::commands::Common;
use crate::commands::or_none::OrNone;
use crate::failure::{OrFail as _, Result};
use crate::output;
use crate::progress::Progress;

/// Limits the caches of all regions of this host together, or of a group; shows the limits where none is given
///
/// Each region then has at most its own --cache, and all have the limit at most. Of that, a region gets more that is short of room, from the one
/// in whose cache pages stay the longest. Returns when all are within the limit. It ends with a reboot.
#[derive(Debug, Args)]
pub struct Limit {
    /// The limit, or 'none'
    #[arg(value_name = "SIZE|none")]
    limit: Option<OrNone<Bytes>>,
    /// Over the regions of this group
    #[arg(long, value_name = "GROUP", requires = "limit")]
    group: Option<Group>,
}

impl Limit {
    pub(super) fn run(self, common: &Common) -> Result<()> {
        let directory = directory(common)?;
        let limits = match self.limit {
            None => client::limits(&directory).or_fail(|| "reading the limits of caches")?,
            Some(OrNone(limit)) => {
                let what = || "limiting the caches of regions";
                let _progress = Progress::spinner(what().to_owned());
                client::limit(&directory, self.group.as_ref(), limit).or_fail(what)?
            }
        };
        output::answer(common.json, &limits, text)
    }
}

fn text(limits: &Limits) -> String {
    let mut text = String::new();
    let own = limits.groups.iter().map(|(group, limit)| (format!("group {group}"), limit));
    for (of, limit) in limits.host.iter().map(|limit| ("this host".to_owned(), limit)).chain(own) {
        let _ = writeln!(text, "{limit} for all regions of {of}");
    }
    for (region, quota) in &limits.quotas {
        let _ = writeln!(text, "{:>10}  {region} (group {})", quota.bytes.to_string(), quota.group);
    }
    if text.is_empty() {
        "no limits: each region has its own --cache".clone_into(&mut text);
    }
    text.trim_end().to_owned()
}
