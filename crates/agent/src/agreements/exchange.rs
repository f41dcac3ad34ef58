//! The questions of one host to another about agreements, and the answers.

use aquifer_api::agreement::{GivenAgreement, Known, KnownAgreement};
use aquifer_api::{Problem, path};
use aquifer_control::group::agreements::{Edition, Line, State as KeyState, Wanted, is_listed};
use aquifer_group::{Agreement, GroupError, Held, Offered};
use aquifer_page::{Group, HostName};

use super::{Inner, Passing, different};

/// The largest list, in bytes: a full catalog of long names and lists of hosts.
const LARGEST_LIST: usize = 8 << 20;

/// The largest agreement, in bytes.
const LARGEST_AGREEMENT: usize = 256 << 10;

fn problem(error: impl std::fmt::Display) -> Problem {
    Problem { error: error.to_string(), help: None }
}

/// Says that a host may not have an agreement.
fn not_listed(host: &HostName, group: &Group) -> Problem {
    Problem {
        error: format!("host {host} may not have the agreement of group '{group}'"),
        help: Some(format!("name it with 'aquifer group set {group} --host' on a host that may")),
    }
}

impl Passing {
    /// Answers `from`, which asks what this host knows.
    ///
    /// # Errors
    /// If `from` is no peer.
    pub(crate) fn list(&self, from: &HostName) -> Result<Known, Problem> {
        self.0.peers.admit(from)?;
        Ok(self.state().known())
    }

    /// Gives the agreement of a group to `from`; `None` if this host has none that it may give.
    ///
    /// # Errors
    /// If `from` is no peer, or the agreement names hosts and not this one.
    pub(crate) fn give(
        &self,
        from: &HostName,
        group: &Group,
    ) -> Result<Option<GivenAgreement>, Problem> {
        self.0.peers.admit(from)?;
        let state = self.state();
        let held = state.survey.held.get(group);
        let held = held.filter(|held| !state.catalog.is_removed(group, held.key));
        let Some(Held { agreement, edition, by, .. }) = held else { return Ok(None) };
        if !is_listed(&agreement.hosts, from.as_str()) {
            return Err(not_listed(from, group));
        }
        let text = agreement.to_text().map_err(problem)?;
        tracing::info!(%group, to = %from, "gave the group's agreement to another host");
        Ok(Some(GivenAgreement { agreement: text, edition: *edition, by: by.clone() }))
    }

    /// Asks `host` for its list, and for the agreements that this host lacks.
    pub(super) async fn ask(&self, host: &HostName) {
        let _turn = self.0.turn.lock().await;
        // Its news at the time of the question: if it tells others since, this host asks again.
        let digest = self.0.peers.agreements().get(host).copied().unwrap_or_default();
        let asked = self.exchange(host).await;
        let now = self.now();
        let mut state = self.state();
        let wanted = state.wanted(&self.0.own);
        match asked {
            Ok(()) => state.asking.answered(now, host, digest, &wanted),
            Err(Problem { error, .. }) => {
                state.asking.failed(now, host, digest);
                tracing::warn!(from = %host, "cannot get agreements of groups: {error}");
            }
        }
    }

    async fn exchange(&self, from: &HostName) -> Result<(), Problem> {
        let known: Known = self.0.peers.read(from, path::AGREEMENTS, LARGEST_LIST).await?;
        let inner = self.0.clone();
        let (host, lines) = (from.clone(), known.agreements.clone());
        let noted = tokio::task::spawn_blocking(move || inner.note(&host, lines)).await;
        noted.map_err(problem)??;
        self.look().await;
        let wanted = self.state().wanted(&self.0.own);
        let is_there = |wanted: &&Wanted| {
            let mut held = known.agreements.iter().filter(|known| known.held);
            held.any(|known| known.group == wanted.group && known.key_id == wanted.key)
        };
        let mut failed = Vec::new();
        for wanted in wanted.iter().filter(is_there) {
            failed.extend(self.fetch(from, wanted).await.err().map(|problem| problem.error));
        }
        self.look().await;
        let mut state = self.state();
        self.0.tell(&mut state);
        if failed.is_empty() { Ok(()) } else { Err(problem(failed.join("; "))) }
    }

    async fn fetch(&self, from: &HostName, wanted: &Wanted) -> Result<(), Problem> {
        let path = path::agreement(&wanted.group);
        let given: GivenAgreement = self.0.peers.read(from, &path, LARGEST_AGREEMENT).await?;
        let GivenAgreement { agreement, edition, by } = given;
        // Without the parser's error: the log shows no text that another host chose.
        let agreement = Agreement::from_text(&agreement).map_err(|_| {
            problem(format!("{from} sent no agreement of group '{}'", wanted.group))
        })?;
        if agreement.name != wanted.group || edition < wanted.edition {
            return Err(problem(format!(
                "{from} sent an agreement of group '{}' that it did not announce",
                wanted.group
            )));
        }
        let offered =
            Offered { agreement, announced: (wanted.key, edition), by, from: from.clone() };
        let inner = self.0.clone();
        let taken = tokio::task::spawn_blocking(move || inner.take(offered));
        if taken.await.map_err(problem)?.map_err(problem)? {
            let Edition { version, .. } = edition;
            let what = format!("host {from} gave version {version} of its agreement");
            tracing::info!(group = %wanted.group, "{what}");
            self.0.journal.decided_about_group(&wanted.group, what);
        }
        Ok(())
    }

    /// Makes sure that this host and `from`, from which a VM of the group arrives, have the same
    /// agreement.
    ///
    /// # Errors
    /// If the two have different keys, or this host may not have the agreement.
    pub(crate) async fn agree_with(&self, from: &HostName, group: &Group) -> Result<(), Problem> {
        let asked = self.0.peers.read::<Known>(from, path::AGREEMENTS, LARGEST_LIST).await;
        // An agent of an older version has no list: then this host's own copy decides.
        let Ok(known) = asked else { return Ok(()) };
        let theirs = known.agreements.iter().find(|known| known.held && known.group == *group);
        let Some(theirs) = theirs else { return Ok(()) };
        self.look().await;
        let here = self.state().survey.held.get(group).map(|held| (held.key, held.edition));
        match here {
            Some((key, _)) if key != theirs.key_id => {
                return Err(different(group, (&self.0.own, key), (from, theirs.key_id)));
            }
            Some((_, edition)) if theirs.edition.is_none_or(|theirs| theirs <= edition) => {
                return Ok(());
            }
            _ => self.ask(from).await,
        }
        let state = self.state();
        if state.survey.held.contains_key(group) {
            return Ok(());
        }
        if let Some(conflict) = state.conflict(group) {
            return Err(conflict);
        }
        match is_listed(&theirs.hosts, self.0.own.as_str()) {
            true => Ok(()),
            false => Err(not_listed(&self.0.own, group)),
        }
    }
}

impl Inner {
    fn take(&self, offered: Offered) -> Result<bool, GroupError> {
        let catalog = super::lock(&self.state).catalog.clone();
        self.agreements.take(&self.own, offered, &catalog)
    }

    /// Merges the list of another host. A removal is on disk before this host tells it.
    fn note(&self, from: &HostName, lines: Vec<KnownAgreement>) -> Result<(), Problem> {
        for KnownAgreement { group, key_id, edition, by, hosts, .. } in lines {
            let state = edition.map_or(KeyState::Removed, KeyState::Agreed);
            let is_news = super::lock(&self.state).catalog.lacks(&group, key_id, state);
            if is_news && state == KeyState::Removed {
                self.agreements.forget(&group, key_id).map_err(problem)?;
                let what = format!("host {from} says that the group with key {key_id} is removed");
                tracing::info!(%group, "{what}");
                self.journal.decided_about_group(&group, what);
            }
            let line = Line { state, by, hosts };
            super::lock(&self.state).catalog.merge(&group, key_id, line);
        }
        Ok(())
    }
}
