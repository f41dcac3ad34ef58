//! This host's groups: their agreements, their scanners and, if configured, the hand-out of the
//! memory that they save.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use aquifer_api::Problem;
use aquifer_api::group::Group;
use aquifer_api::status::GroupScanner;
use aquifer_group::balance::{Balanced, Balancing};
use aquifer_group::caching::Caching;
use aquifer_group::scanning::{self, Scanning};
use aquifer_group::{Agreement, Agreements, News};
use aquifer_page::{Bytes, lock};

use crate::background::Background;
use crate::config::GroupsConfig;
use crate::driver::Journal;

/// The groups' agreements, and the latest hand-out.
#[derive(Clone, Debug)]
pub struct Groups {
    agreements: Agreements,
    scans: bool,
    last: Arc<Mutex<Vec<Balanced>>>,
}

impl Groups {
    /// Returns the groups of the configured directory.
    pub fn new(config: &GroupsConfig) -> Self {
        let agreements = Agreements::of(&config.agreements);
        Self { agreements, scans: config.scan, last: Arc::default() }
    }

    /// Hands out the groups' savings until the caller drops the result.
    ///
    /// # Errors
    /// If the thread cannot start.
    pub(crate) fn balance(&self, state: &Path, journal: Journal) -> io::Result<Background> {
        let balancing = Balancing::new(state, self.agreements.clone());
        let groups = self.clone();
        let work = move |balancing: &mut Balancing| groups.step(balancing, &journal);
        Background::start("groups", balancing, work)
    }

    /// Keeps the groups' scanners and disk caches running until the caller drops the result. They
    /// then go on, and the next agent finds them.
    ///
    /// # Errors
    /// If the thread cannot start.
    pub(crate) fn serve(
        &self,
        exe: &Path,
        state: &Path,
        journal: Journal,
    ) -> io::Result<Background> {
        let scanning = Scanning::new(exe, state, self.agreements.clone(), self.scans);
        let caching = Caching::new(exe, state, self.agreements.clone());
        let work = move |(scanning, caching): &mut (Scanning, Caching)| {
            match scanning.step() {
                Ok(news) => tell(news, &journal),
                Err(error) => tracing::warn!("cannot look at the groups' scanners: {error}"),
            }
            match caching.step() {
                Ok(news) => tell(news, &journal),
                Err(error) => tracing::warn!("cannot look at the groups' disk caches: {error}"),
            }
        };
        Background::start("group-helpers", (scanning, caching), work)
    }

    fn step(&self, balancing: &mut Balancing, journal: &Journal) {
        let round = match balancing.step(true) {
            Ok(round) => round,
            Err(error) => return tracing::warn!("cannot hand out the groups' savings: {error}"),
        };
        for change in &round.changes {
            tracing::info!("{change}");
        }
        for Balanced { account, plan, failed, .. } in &round.groups {
            for decision in plan.decisions.iter().filter(|decision| decision.from != decision.to) {
                tracing::info!(
                    group = %account.group, vm = %decision.vm, from = %decision.from,
                    to = %decision.to, "{decision}"
                );
                journal.decided_about(&decision.vm, format!("VM {decision}"));
            }
            failed.iter().for_each(|failure| tracing::warn!(group = %account.group, "{failure}"));
        }
        *lock(&self.last) = round.groups;
    }

    /// Returns all groups with their terms and the latest hand-out.
    ///
    /// # Errors
    /// Says which part of an agreement is wrong.
    pub(crate) fn all(&self) -> Result<Vec<Group>, Problem> {
        let problem =
            |error: &dyn std::fmt::Display| Problem { error: error.to_string(), help: None };
        let last = lock(&self.last).clone();
        let shown = |agreement: Agreement| {
            let balanced = last.iter().find(|one| one.account.group == agreement.name);
            Ok(Group {
                key_id: agreement.key.id(),
                terms: agreement.public().map_err(|error| problem(&error))?,
                balanced: balanced
                    .map(serde_json::to_value)
                    .transpose()
                    .map_err(|error| problem(&error))?,
                name: agreement.name,
            })
        };
        self.agreements.all().map_err(|error| problem(&error))?.into_iter().map(shown).collect()
    }
}

fn tell(news: Vec<News>, journal: &Journal) {
    for news in news {
        match news.failed {
            true => tracing::warn!(group = %news.group, "{}", news.what),
            false => tracing::info!(group = %news.group, "{}", news.what),
        }
        journal.decided_about_group(&news.group, news.what);
    }
}

/// Returns the scanners of the host whose processes have their files in `state`.
pub(crate) fn scanners(state: &Path) -> Vec<GroupScanner> {
    let found = scanning::all(state).unwrap_or_else(|error| {
        tracing::debug!("cannot list the groups' scanners: {error}");
        Vec::new()
    });
    let shown = |(group, scanner): (_, scanning::Found)| {
        let report = scanner.report.as_ref();
        GroupScanner {
            group,
            pid: scanner.pid.as_raw_nonzero().get().cast_unsigned(),
            by_agent: scanner.terms.is_some_and(|terms| terms.by_agent),
            regions: report.map_or(0, |report| report.sharing.regions),
            shared: report.map_or(Bytes::ZERO, |report| report.sharing.shared_bytes),
            saved: report.map_or(Bytes::ZERO, |report| report.sharing.saved_bytes),
            cpu_pct: report.map_or(0.0, |report| report.scanner_cpu_pct),
            passes: report.map_or(0, |report| report.passes),
        }
    };
    found.into_iter().map(shown).collect()
}
