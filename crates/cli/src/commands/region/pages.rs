//! `aquifer region pages` and `aquifer region drop`.

use aquifer_region_client::Run;
use aquifer_page::RegionName;
use aquifer_region::process::{Extent, Files, PageState, Pages as Alike, client};
use clap::Args;
use serde::Serialize;

use super::{Which, done};
use crate::commands::Common;
use crate::failure::{OrFail as _, Result};
use crate::output;

/// Makes a region, or some pages of it, read as zeroes, and gives back what they took, here and with lenders
#[derive(Debug, Args)]
pub struct Drop {
    #[command(flatten)]
    part: Part,
}

/// Where each page of a region is, and where its extents of 64 MiB are with lenders
///
/// A page is 'zero' (nowhere), 'remote' (with a lender only), 'resident' (in local RAM, and with a lender) or 'dirty' (in local RAM only, as it
/// is now); or it is 'shared' (kept once for several regions of the group, see 'aquifer group scan'). What a program has written to a page since that came is only found when it leaves.
#[derive(Debug, Args)]
pub struct Pages {
    #[command(flatten)]
    part: Part,
}

/// Some pages of a region, or all.
#[derive(Debug, Args)]
struct Part {
    /// The region
    name: RegionName,
    /// The first page, of 4 KiB, from 0 on
    #[arg(long, value_name = "PAGE", default_value_t = 0)]
    first: u64,
    /// How many; all that follow unless said
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
            client::all_pages(&files).or_fail(|| format!("looking at region '{}'", self.name))?;
        let count = self.count.unwrap_or(all.count.saturating_sub(self.first));
        Ok((files, Run { first: self.first, count }))
    }
}

impl Drop {
    pub(super) fn run(self, common: &Common) -> Result<()> {
        let (files, pages) = self.part.find(common)?;
        client::drop_pages(&files, pages).or_fail(|| format!("dropping '{}'", self.part.name))?;
        done(common, self.part.name, "dropped")
    }
}

impl Pages {
    pub(super) fn run(self, common: &Common) -> Result<()> {
        let (files, pages) = self.part.find(common)?;
        let what = || format!("looking at the pages of '{}'", self.part.name);
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
        .map(|run| format!("{:>10} {:>10}  {}", run.first, run.count, name(run.state)));
    let extents = found.extents.iter().map(|extent| {
        let Extent { from, lease, at } = extent;
        format!(
            "from {from}: lease {} of {} at {}, from {at}",
            lease.lease, lease.lender, lease.address
        )
    });
    let titled =
        ["      PAGE      COUNT  STATE".to_owned()].into_iter().chain(pages).chain(extents);
    titled.collect::<Vec<_>>().join("\n")
}
