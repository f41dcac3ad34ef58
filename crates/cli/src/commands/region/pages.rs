//! `aquifer region show-pages` and `aquifer region drop`.

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

// No doc comment: it would take the place of the commands' own help.
#[derive(Debug, Args)]
pub(super) struct Part {
    /// Name of the region
    name: RegionName,
    /// Index of the first page; pages are 4 KiB
    #[arg(long, value_name = "PAGE", default_value_t = 0)]
    first: u64,
    /// Number of pages; default all to the end of the region
    #[arg(long, value_name = "N")]
    count: Option<u64>,
}

/// The answer of `aquifer region show-pages`.
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

    pub(super) fn drop(self, common: &Common) -> Result<()> {
        let (files, pages) = self.find(common)?;
        client::drop_pages(&files, pages)
            .or_fail(|| format!("zeroing pages of region '{}'", self.name))?;
        done(common, self.name, "dropped")
    }

    pub(super) fn show(self, common: &Common) -> Result<()> {
        let (files, pages) = self.find(common)?;
        let what = || format!("querying the pages of region '{}'", self.name);
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
