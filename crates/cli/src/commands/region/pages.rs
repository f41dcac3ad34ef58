//! `aquifer region pages` and `aquifer region drop`.

use aquifer_page::RegionName;
use aquifer_region::process::{Extent, Files, PageState, Pages as Alike, client};
use aquifer_region_client::Run;
use clap::Args;
use serde::Serialize;

use super::{Which, done};
use crate::commands::Common;
use crate::failure::{OrFail as _, Result};
use crate::output;
use crate::table::{Column, table};

/// Zero pages of a region and free the memory they take
///
/// Frees memory of this host and of lenders.
#[derive(Debug, Args)]
pub struct Drop {
    #[command(flatten)]
    part: Part,
}

/// Show where each page and extent of a region is
///
/// A page is 'zero' (stored nowhere), 'remote' (only at a lender), 'resident' (in local RAM and at
/// a lender), 'dirty' (newer in local RAM) or 'shared'. A shared page is kept once for several
/// regions of the group ('aquifer serve dedup'). A write to a resident page shows as dirty only
/// when the engine scans or evicts that page. Extents are 64 MiB.
#[derive(Debug, Args)]
pub struct Pages {
    #[command(flatten)]
    part: Part,
}

/// Some pages of a region, or all.
#[derive(Debug, Args)]
struct Part {
    /// Name of the region
    name: RegionName,
    /// Index of the first page; pages are 4 KiB
    #[arg(long, value_name = "PAGE", default_value_t = 0)]
    first: u64,
    /// Number of pages; default all to the end of the region
    #[arg(long, value_name = "N")]
    count: Option<u64>,
}

/// The answer of `aquifer region pages`.
#[derive(Debug, Serialize)]
struct Found {
    pages: Vec<Alike>,
    extents: Vec<Extent>,
}

impl Part {
    fn find(&self, common: &Common) -> Result<(Files, Run)> {
        let files = Which { name: self.name.clone() }.files(common)?;
        let all =
            client::all_pages(&files).or_fail(|| format!("querying region '{}'", self.name))?;
        let count = self.count.unwrap_or(all.count.saturating_sub(self.first));
        Ok((files, Run { first: self.first, count }))
    }
}

impl Drop {
    pub(super) fn run(self, common: &Common) -> Result<()> {
        let (files, pages) = self.part.find(common)?;
        client::drop_pages(&files, pages)
            .or_fail(|| format!("zeroing pages of region '{}'", self.part.name))?;
        done(common, self.part.name, "dropped")
    }
}

impl Pages {
    pub(super) fn run(self, common: &Common) -> Result<()> {
        let (files, pages) = self.part.find(common)?;
        let what = || format!("querying the pages of region '{}'", self.part.name);
        let found = Found {
            pages: client::pages(&files, pages).or_fail(what)?,
            extents: client::extents(&files).or_fail(what)?,
        };
        output::answer(common.json, &found, text)
    }
}

fn text(found: &Found) -> String {
    let name = |state| match state {
        PageState::Zero => "zero",
        PageState::Remote => "remote",
        PageState::Resident => "resident",
        PageState::Dirty => "dirty",
        PageState::Shared => "shared",
    };
    let pages = found
        .pages
        .iter()
        .map(|run| [run.first.to_string(), run.count.to_string(), name(run.state).to_owned()]);
    let columns = [Column::numbers("PAGE"), Column::numbers("COUNT"), "STATE".into()];
    let extents = found.extents.iter().map(|extent| {
        let Extent { from, lease, at } = extent;
        format!(
            "from {from}: lease {} of {} at {}, from {at}",
            lease.lease, lease.lender, lease.address
        )
    });
    std::iter::once(table(columns, pages)).chain(extents).collect::<Vec<_>>().join("\n")
}
