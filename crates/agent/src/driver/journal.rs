//! The latest decisions and role changes, in memory only; the log keeps them longer.

use std::collections::VecDeque;

use aquifer_api::status::{Decision, Role, RoleChange};

use crate::events::now;

/// How many decisions and role changes `status` shows.
const REMEMBERED: usize = 200;

/// The latest decisions and role changes.
#[derive(Debug, Default)]
pub(super) struct Journal {
    decisions: VecDeque<Decision>,
    role_changes: VecDeque<RoleChange>,
}

impl Journal {
    /// Logs a decision and keeps it.
    pub(super) fn decided(&mut self, role: Role, what: String) {
        tracing::info!(%role, "{what}");
        remember(&mut self.decisions, Decision { at: now(), what });
    }

    pub(super) fn role_changed(&mut self, from: Role, to: Role) {
        let change = RoleChange { at: now(), from, to };
        remember(&mut self.role_changes, change);
    }

    /// Returns the kept decisions, oldest first.
    pub(super) fn decisions(&self) -> Vec<Decision> {
        self.decisions.iter().cloned().collect()
    }

    /// Returns the kept role changes, oldest first.
    pub(super) fn role_changes(&self) -> Vec<RoleChange> {
        self.role_changes.iter().copied().collect()
    }
}

fn remember<T>(latest: &mut VecDeque<T>, new: T) {
    if latest.len() == REMEMBERED {
        latest.pop_front();
    }
    latest.push_back(new);
}
