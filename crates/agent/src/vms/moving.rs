//! The moves that this agent decides on: it finds a host, and follows the move by the VM's
//! supervisor. If the agent dies, the supervisor cancels the move, or completes it after the
//! hand-over.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aquifer_api::order::{Awaited, Migrate};
use aquifer_control::node::{MoveEnd, Threshold};
use aquifer_page::{Bytes, HostName, RegionName, lock};
use aquifer_vm::VmError;
use aquifer_vm::migrate::{Mode, Order, Progress};
use aquifer_vm::process::{Files, client};

use super::{Vms, Wanted};
use crate::peers::AskError;

/// The longest downtime of a VM, as far as it can be predicted.
const MAX_DOWNTIME: Duration = Duration::from_secs(1);

/// The move in progress, if there is one.
#[derive(Debug, Default)]
pub(super) struct Moving {
    cancelled: AtomicBool,
    now: Mutex<Option<Underway>>,
}

/// The state of a move.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Underway {
    /// The destination, once it is known.
    pub(super) to: Option<HostName>,
    /// The phase, as the VM's supervisor names it.
    pub(super) phase: String,
    /// The bytes sent to the destination and to lenders.
    pub(super) sent: Bytes,
}

impl Moving {
    /// Returns the state of the move in progress.
    pub(super) fn underway(&self) -> Underway {
        lock(&self.now).clone().unwrap_or_default()
    }

    fn set(&self, now: Option<Underway>) {
        *lock(&self.now) = now;
    }

    /// Notes progress; returns whether the move goes on.
    fn tell(&self, to: &HostName, progress: &Progress) -> bool {
        let sent = Bytes(progress.bytes_sent).saturating_add(Bytes(progress.bytes_pool));
        self.set(Some(Underway { to: Some(to.clone()), phase: progress.phase.clone(), sent }));
        !self.cancelled.load(Ordering::Relaxed)
    }
}

impl Vms {
    /// Cancels the move in progress, unless the VM is handed over already.
    pub(crate) fn cancel_move(&self) {
        self.0.moving.cancelled.store(true, Ordering::Relaxed);
    }

    /// Moves a VM to the host that has most room and takes it, but not to `avoid`.
    pub(crate) async fn move_away(
        &self,
        vm: &RegionName,
        avoid: Option<HostName>,
        below: Threshold,
    ) -> MoveEnd {
        self.0.moving.cancelled.store(false, Ordering::Relaxed);
        let end = self.find_and_move(vm, Wanted { avoid, below }).await;
        self.0.moving.set(None);
        end
    }

    async fn find_and_move(&self, vm: &RegionName, wanted: Wanted) -> MoveEnd {
        let order = Migrate { vm: vm.clone(), to: None, cache: None };
        let (awaited, why) = match self.offer_to(order, wanted).await {
            Ok(found) => found,
            Err(AskError::Refused(problem)) => return MoveEnd::Refused { why: problem.error },
            Err(AskError::Lost(problem)) => {
                return MoveEnd::Failed { to: None, why: problem.error };
            }
        };
        if self.0.moving.cancelled.load(Ordering::Relaxed) {
            // The destination stops to wait by itself.
            return MoveEnd::Cancelled;
        }
        let (vms, files, to) =
            (self.clone(), Files::new(&self.0.config.state, vm), awaited.to.clone());
        let moved = tokio::task::spawn_blocking(move || vms.follow(&files, awaited, why)).await;
        moved.unwrap_or_else(|error| MoveEnd::Failed { to: Some(to), why: error.to_string() })
    }

    /// Orders the move from the VM's supervisor, and follows it to its end.
    fn follow(&self, files: &Files, awaited: Awaited, why: String) -> MoveEnd {
        let Awaited { to, migration, address, identity, defined } = awaited;
        let order = Order {
            migration,
            to: to.clone(),
            address,
            identity,
            mode: Mode::Instant,
            bandwidth: None,
            max_downtime: MAX_DOWNTIME,
            // With post-copy, the VM would be lost if either host died meanwhile.
            may_leave: false,
            defined,
        };
        let moved = client::migrate(files, &order, |progress| self.0.moving.tell(&to, progress));
        match moved {
            Ok(report) => {
                let sent = report.bytes_pages + report.bytes_pool + report.bytes_metadata;
                MoveEnd::Moved { to, sent: Bytes(sent), why }
            }
            Err(VmError::Cancelled) => MoveEnd::Cancelled,
            Err(error) => MoveEnd::Failed { to: Some(to), why: error.to_string() },
        }
    }
}
