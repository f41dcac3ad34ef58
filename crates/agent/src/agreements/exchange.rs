//! The questions of one host to another about agreements, and the answers.

use std::collections::BTreeSet;
use std::time::Duration;

use aquifer_api::agreement::{GivenAgreement, Known, KnownAgreement};
use aquifer_api::{Problem, path};
use aquifer_control::group::agreements::{
    Edition, KeyId, Line, State as KeyState, Wanted, is_listed,
};
use aquifer_group::{Agreement, GroupError, Held, LARGEST_AGREEMENT, Offered};
use aquifer_page::{Group, HostName};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::{Inner, Passing, different};
use crate::peers::AskError;

/// The largest list, in bytes: a full catalog of long names and lists of hosts.
const LARGEST_LIST: usize = 8 << 20;

/// The largest answer with an agreement, in bytes: JSON may escape each byte with five more.
const LARGEST_GIFT: usize = 6 * LARGEST_AGREEMENT + 1024;

/// Timeout of an exchange with one host: the others wait for their turn.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(10);

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

/// Returns the agreement that the sender of this list has of a group; `None` if it knows of none.
fn of_sender<'a>(
    Known { agreements }: &'a Known,
    group: &Group,
) -> Result<Option<&'a KnownAgreement>, Problem> {
    let of_group = agreements.iter().filter(|known| known.group == *group);
    let (live, removed): (Vec<_>, Vec<_>) = of_group.partition(|known| known.edition.is_some());
    if let Some(held) = live.iter().find(|known| known.held) {
        return Ok(Some(held));
    }
    // A host that lacks the latest version of its agreement says of no line that it has it.
    match live.as_slice() {
        [] if removed.is_empty() => Ok(None),
        [] => Err(problem(GroupError::Removed(group.clone()))),
        [one] => Ok(Some(one)),
        [one, other, ..] => Err(different(group, (&one.by, one.key_id), (&other.by, other.key_id))),
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
        // A later version may exclude `from`, so an earlier one goes to no host.
        let is_latest = |held: &&Held| {
            held.is_latest && state.catalog.latest(group, held.key) == Some(held.edition)
        };
        let held = held.filter(is_latest);
        let Some(Held { agreement, edition, by, .. }) = held else { return Ok(None) };
        if !is_listed(&agreement.hosts, from.as_str()) {
            return Err(not_listed(from, group));
        }
        let text = agreement.to_text().map_err(problem)?;
        tracing::debug!(%group, to = %from, "gave the group's agreement to another host");
        Ok(Some(GivenAgreement { agreement: text, edition: *edition, by: by.clone() }))
    }

    /// Asks `host` for its list, and for the agreements that this host lacks.
    pub(super) async fn ask(&self, host: &HostName) {
        let _turn = self.0.turn.lock().await;
        self.ask_in_turn(host).await;
    }

    /// Asks several hosts at once.
    pub(super) async fn ask_all(&self, hosts: BTreeSet<HostName>) {
        let _turn = self.0.turn.lock().await;
        let mut asked = JoinSet::new();
        for host in hosts {
            let passing = self.clone();
            asked.spawn(async move { passing.ask_in_turn(&host).await });
        }
        asked.join_all().await;
    }

    async fn ask_in_turn(&self, host: &HostName) {
        // Its news at the time of the question: if it tells others since, this host asks again.
        let digest = self.0.peers.agreements().get(host).copied().unwrap_or_default();
        let asked = timeout(EXCHANGE_TIMEOUT, self.exchange(host)).await;
        let late = |_| Err(problem(format!("{host} did not answer all within 10 s")));
        let asked = asked.unwrap_or_else(late);
        self.look().await;
        let now = self.now();
        let mut state = self.state();
        self.0.tell(&mut state);
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
        let known = self.0.peers.read::<Known>(from, path::AGREEMENTS, LARGEST_LIST).await?;
        let known = known.ok_or_else(|| problem("its agent is of an older version"))?;
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
        let mut refused = Vec::new();
        for wanted in wanted.iter().filter(is_there) {
            match self.fetch(from, wanted).await {
                Ok(()) => {}
                Err(AskError::Refused(problem)) => refused.push(problem.error),
                // The next question would wait as long.
                Err(AskError::Lost(problem)) => return Err(problem),
            }
        }
        if refused.is_empty() { Ok(()) } else { Err(problem(refused.join("; "))) }
    }

    async fn fetch(&self, from: &HostName, wanted: &Wanted) -> Result<(), AskError> {
        let refused = |why: String| AskError::Refused(problem(why));
        let group = &wanted.group;
        let given = self.0.peers.read(from, &path::agreement(group), LARGEST_GIFT).await?;
        let given: Option<GivenAgreement> = given;
        let given =
            given.ok_or_else(|| refused(format!("{from} has no group '{group}' any more")))?;
        let GivenAgreement { agreement, edition, by } = given;
        // Without the parser's error: the log shows no text that another host chose.
        let agreement = Agreement::from_text(&agreement)
            .map_err(|_| refused(format!("{from} sent no agreement of group '{group}'")))?;
        if !wanted.is_answered_by(&agreement.name, edition) {
            return Err(refused(format!(
                "{from} sent an agreement of group '{group}' that it did not announce"
            )));
        }
        let offered =
            Offered { agreement, announced: (wanted.key, edition), by, from: from.clone() };
        let inner = self.0.clone();
        let taken = tokio::task::spawn_blocking(move || inner.take(offered)).await;
        match taken.map_err(|error| refused(error.to_string()))? {
            Ok(false) => {}
            Ok(true) => {
                let Edition { version, .. } = edition;
                let what = format!("host {from} gave version {version} of its agreement");
                tracing::info!(%group, "{what}");
                self.0.journal.decided_about_group(group, what);
            }
            Err(error) => {
                self.state().warn(&self.0.journal, group, error.to_string());
                return Err(refused(error.to_string()));
            }
        }
        Ok(())
    }

    /// Makes sure that this host and `from`, from which a VM of the group arrives, have the same
    /// agreement.
    ///
    /// # Errors
    /// If `from` does not answer, the two have different keys, an operator removed the agreement,
    /// or this host may not have it or cannot get it.
    pub(crate) async fn agree_with(&self, from: &HostName, group: &Group) -> Result<(), Problem> {
        let known = self.0.peers.read::<Known>(from, path::AGREEMENTS, LARGEST_LIST).await?;
        // An agent of an older version has no list: then this host's own copy decides.
        let Some(known) = known else { return Ok(()) };
        let Some(theirs) = of_sender(&known, group)? else { return Ok(()) };
        if !is_listed(&theirs.hosts, self.0.own.as_str()) {
            return Err(not_listed(&self.0.own, group));
        }
        self.look().await;
        let here = self.state().survey.held.get(group).map(|held| (held.key, held.edition));
        match here {
            Some((key, _)) if key != theirs.key_id => {
                return Err(different(group, (&self.0.own, key), (from, theirs.key_id)));
            }
            Some((_, edition)) if theirs.edition.is_none_or(|theirs| theirs <= edition) => {
                return Ok(());
            }
            _ => _ = timeout(EXCHANGE_TIMEOUT, self.ask(from)).await,
        }
        let state = self.state();
        if state.survey.held.contains_key(group) {
            return Ok(());
        }
        Err(state.conflict(group).unwrap_or_else(|| Problem {
            error: format!("host {} could not get the agreement of group '{group}'", self.0.own),
            help: Some(format!("see 'aquifer why {group}' there")),
        }))
    }
}

impl Inner {
    fn take(&self, offered: Offered) -> Result<bool, GroupError> {
        let catalog = super::lock(&self.state).catalog.clone();
        self.agreements.take(&self.own, offered, &catalog)
    }

    /// Merges the list of another host, and marks what is removed. The line comes before the mark:
    /// a survey takes a mark without a line for a removal on this host.
    fn note(&self, from: &HostName, lines: Vec<KnownAgreement>) -> Result<(), Problem> {
        for KnownAgreement { group, key_id, edition, by, hosts, .. } in lines {
            let state = edition.map_or(KeyState::Removed, KeyState::Agreed);
            let line = Line { state, by, hosts };
            if !self.hear(&group, key_id, &line) {
                continue;
            }
            {
                let mut state = super::lock(&self.state);
                state.catalog.merge(&group, key_id, line);
                // The next survey notes that this host lacks the latest version.
                state.files = None;
            }
            if state == KeyState::Removed {
                self.agreements.forget(&group, key_id).map_err(problem)?;
                let what = format!("host {from} says that the group with key {key_id} is removed");
                tracing::info!(%group, "{what}");
                self.journal.decided_about_group(&group, what);
            }
        }
        Ok(())
    }

    /// Returns whether a line is to be merged. Warns of two versions that replace the same one.
    fn hear(&self, group: &Group, key: KeyId, line: &Line) -> bool {
        let mut state = super::lock(&self.state);
        let known = state.catalog.line(group, key);
        if let Some(known) = known.filter(|known| known.is_rival(line)) {
            let what = format!(
                "hosts {} and {} changed its agreement at once: the change of one of them is lost",
                known.by, line.by
            );
            state.warn(&self.journal, group, what);
        }
        state.catalog.admits(group, key, line)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use aquifer_control::group::agreements::TermsHash;

    use super::*;

    fn line(key: u64, version: Option<u64>, held: bool) -> KnownAgreement {
        KnownAgreement {
            group: "blue".parse().unwrap(),
            key_id: KeyId(key),
            edition: version.map(|version| Edition { version, hash: TermsHash(0) }),
            by: "a".parse().unwrap(),
            hosts: Vec::new(),
            held,
            conflict: None,
        }
    }

    /// Returns the key that the sender of these lines has.
    fn key(agreements: &[KnownAgreement]) -> Result<Option<u64>, String> {
        let known = Known { agreements: agreements.to_vec() };
        let found = of_sender(&known, &"blue".parse().unwrap());
        found.map(|found| found.map(|known| known.key_id.0)).map_err(|problem| problem.error)
    }

    #[test]
    fn the_senders_agreement_is_found_or_refused() {
        assert_eq!(key(&[]), Ok(None));
        assert_eq!(key(&[line(1, Some(1), false), line(2, Some(1), true)]), Ok(Some(2)));
        // It lacks the latest version.
        assert_eq!(key(&[line(1, Some(9), false), line(2, None, false)]), Ok(Some(1)));
        assert!(key(&[line(1, None, false)]).unwrap_err().contains("was removed"));
        let two = key(&[line(1, Some(1), false), line(2, Some(1), false)]);
        assert!(two.unwrap_err().contains("different groups named 'blue'"));
    }
}
