//! `aquifer region show-limits` and `aquifer region set-limit`.

use std::fmt::Write as _;

use aquifer_page::{Bytes, Group};
use aquifer_region::RegionError;
use aquifer_region::process::{Limits, client};
use clap::Args;

use super::directory;
use crate::commands::Common;
use crate::commands::or_none::OrNone;
use crate::failure::{OrFail as _, Result};
use crate::output;
use crate::progress::Progress;

/// Show the limits of the caches of all regions together
///
/// Also shows the part of each region under the limits.
#[derive(Debug, Args)]
pub struct ShowLimits {}

/// Limit the caches of all regions together
///
/// Each region also keeps its own --cache as a limit. Under the common limit, a region that is
/// short of cache takes some from the region whose pages stay cached longest. Returns when all
/// caches are within the limit. A reboot removes limits.
#[derive(Debug, Args)]
pub struct SetLimit {
    /// Maximum local RAM for all caches, or 'none'
    #[arg(long, value_name = "SIZE|none")]
    cache: OrNone<Bytes>,
    /// Limit only regions of this group; default all on this host
    #[arg(long, value_name = "GROUP")]
    group: Option<Group>,
}

impl ShowLimits {
    pub(super) fn run(self, common: &Common) -> Result<()> {
        let limits =
            client::limits(&directory(common)?).or_fail(|| "reading the limits of caches")?;
        output::answer(common.json, &limits, text)
    }
}

impl SetLimit {
    pub(super) fn run(self, common: &Common) -> Result<()> {
        let what = || "limiting the caches of regions";
        let directory = directory(common)?;
        let _progress = Progress::spinner(what().to_owned());
        let limited = client::limit(&directory, self.group.as_ref(), self.cache.0);
        let in_force = matches!(limited, Err(RegionError::Refused(_)));
        let limits = limited.or_fail(what).map_err(|failure| match in_force {
            true => failure.help(
                "the limit is in force for all other regions; remove it with --cache none, or \
                 repeat the command",
            ),
            false => failure,
        })?;
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
