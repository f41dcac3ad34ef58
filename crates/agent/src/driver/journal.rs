//! The latest decisions and role changes, in memory only; the log keeps them longer.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use aquifer_api::status::{Decision, Role, RoleChange, Subject, SubjectKind};
use aquifer_control as control;
use aquifer_page::{Group, RegionName, lock};

use crate::events::now;

/// How many decisions and role changes `status` shows.
const REMEMBERED: usize = 200;

/// The latest decisions and role changes. All clones are one journal.
#[derive(Clone, Debug, Default)]
pub struct Journal(Arc<Mutex<Entries>>);

#[derive(Debug, Default)]
struct Entries {
    decisions: VecDeque<Decision>,
    role_changes: VecDeque<RoleChange>,
}

impl Journal {
    /// Logs a decision of the node and keeps it.
    pub(super) fn decided(
        &self,
        role: Role,
        what: String,
        about: impl IntoIterator<Item = control::Subject>,
    ) {
        tracing::info!(%role, "{what}");
        self.keep(what, about.into_iter().map(subject).collect());
    }

    /// Keeps a decision about a VM, which its caller has logged.
    pub(crate) fn decided_about(&self, vm: &RegionName, what: String) {
        self.keep(what, vec![Subject { kind: SubjectKind::Vm, name: vm.to_string() }]);
    }

    /// Keeps a decision about a group, which its caller has logged.
    pub(crate) fn decided_about_group(&self, group: &Group, what: String) {
        self.keep(what, vec![Subject { kind: SubjectKind::Group, name: group.to_string() }]);
    }

    fn keep(&self, what: String, about: Vec<Subject>) {
        remember(&mut lock(&self.0).decisions, Decision { at: now(), what, about });
    }

    pub(super) fn role_changed(&self, from: Role, to: Role) {
        let change = RoleChange { at: now(), from, to };
        remember(&mut lock(&self.0).role_changes, change);
    }

    /// Returns the kept decisions, oldest first.
    pub(super) fn decisions(&self) -> Vec<Decision> {
        lock(&self.0).decisions.iter().cloned().collect()
    }

    /// Returns the kept role changes, oldest first.
    pub(super) fn role_changes(&self) -> Vec<RoleChange> {
        lock(&self.0).role_changes.iter().copied().collect()
    }
}

fn subject(subject: control::Subject) -> Subject {
    let (kind, name) = match subject {
        control::Subject::Host(host) => (SubjectKind::Host, host.to_string()),
        control::Subject::Lease(lease) => (SubjectKind::Lease, lease.to_string()),
        control::Subject::Volume(volume) => (SubjectKind::Volume, volume.to_string()),
        control::Subject::Vm(vm) => (SubjectKind::Vm, vm.to_string()),
        control::Subject::Region(region) => (SubjectKind::Region, region.to_string()),
    };
    Subject { kind, name }
}

fn remember<T>(latest: &mut VecDeque<T>, new: T) {
    if latest.len() == REMEMBERED {
        latest.pop_front();
    }
    latest.push_back(new);
}
