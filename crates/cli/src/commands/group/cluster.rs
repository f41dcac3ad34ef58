//! What this host's agent knows of the groups of other hosts.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aquifer_api::agreement::{Find, Found, Known, KnownAgreement};
use aquifer_api::client::CallError;
use aquifer_api::path;
use aquifer_api::status::{Decision, Subject, SubjectKind};
use aquifer_group::Agreement;
use aquifer_page::Group as Name;

use super::{Groups, conflict};
use crate::agent_call::{Agent, Socket};
use crate::commands::Common;
use crate::failure::{Failure, OrFail as _, Result};

/// The HTTP status of a refusal that no other version of the agent would lift.
const CONFLICT: u16 = 409;

/// How long the agent may look for an agreement on other hosts.
const FIND_LIMIT: Duration = Duration::from_secs(15);

/// How long the agent may take to say what it knows.
const KNOWN_LIMIT: Duration = Duration::from_secs(5);

impl Groups {
    /// Asks this host's agent for a group's agreement, and if told to wait, lets the agent ask
    /// other hosts. `None` if no agent of this directory answers.
    ///
    /// # Errors
    /// If the agent says that hosts have different agreements with that name.
    pub(crate) fn ask_agent(
        &self,
        common: &Common,
        socket: &Socket,
        (group, wait): (&Name, bool),
    ) -> Result<Option<Found>> {
        let agent = socket.clone().agent(common)?;
        if !agent.is_there() {
            return Ok(None);
        }
        let order = Find { group: group.clone(), wait };
        let found = agent.ask(FIND_LIMIT, async |client| {
            client.post::<_, Found>(path::FIND_GROUP, &order).await
        });
        match found {
            Ok(found) => Ok(Some(found).filter(|found| found.directory == self.groups)),
            Err(error @ CallError::Refused { status, .. }) if status.as_u16() == CONFLICT => {
                let failure = Failure::new(format!("finding group '{group}'"), &error);
                Err(error.help().into_iter().fold(failure, Failure::help))
            }
            // A dead agent leaves its socket, and one of an older version does not know the order.
            Err(_) => Ok(None),
        }
    }

    /// Returns the agreement of a group that a region or VM is about to join. If this host has
    /// none, its agent looks for it on other hosts. Returns `None` if none is found.
    ///
    /// # Errors
    /// If the agreement cannot be read or is removed, or hosts have different ones.
    pub(crate) fn to_join(
        &self,
        common: &Common,
        socket: &Socket,
        group: &Name,
    ) -> Result<Option<Agreement>> {
        let what = || format!("joining group '{group}'");
        let is_here = self.all().find(group).or_fail(what)?.is_some();
        if !is_here
            && *group != Name::default()
            && let Some(found) = self.ask_agent(common, socket, (group, true))?
            && let Found { found: false, known_by: Some(by), .. } = found
        {
            let why = format!("it was made on host {by}, and this host could not get it");
            return Err(Failure::new(what(), why).help(format!(
                "see 'aquifer why {group}' here; or name this host with 'aquifer group set {group} \
                 --host' there"
            )));
        }
        self.all().to_join(group).or_fail(what)
    }

    /// Returns what the host's agent knows of all groups of the cluster; nothing if no agent
    /// answers.
    pub(super) fn known(&self, common: &Common) -> Result<Vec<KnownAgreement>> {
        Ok(known(&Socket::of_environment().agent(common)?))
    }
}

/// Returns what an agent knows of all groups of the cluster; nothing if it does not answer.
fn known(agent: &Agent) -> Vec<KnownAgreement> {
    let known =
        agent.ask(KNOWN_LIMIT, async |client| client.get::<Known>(path::KNOWN_GROUPS).await);
    known.map(|known| known.agreements).unwrap_or_default()
}

/// Returns the conflicts and removals of groups that an agent knows now, as its decisions.
pub(crate) fn disputes(agent: &Agent) -> Vec<Decision> {
    let dispute = |known: KnownAgreement| {
        let what = match (conflict(&known), known.edition) {
            (Some(conflict), _) => conflict,
            (None, None) => format!("now: the group with key {} is removed", known.key_id),
            _ => return None,
        };
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let about = Subject { kind: SubjectKind::Group, name: known.group.to_string() };
        Some(Decision { at, what, about: vec![about] })
    };
    known(agent).into_iter().filter_map(dispute).collect()
}
