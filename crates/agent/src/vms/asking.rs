//! The question to a host whether it takes a VM. Before, the lenders of the VM's memory let that
//! host use their leases.

use aquifer_api::message::{Arrive, Awaits, Permit};
use aquifer_api::{Done, Problem, Threshold, path};
use aquifer_page::{HostName, LeaseId};
use aquifer_region::process::RegionSpec;

use super::Inner;
use crate::borrower;
use crate::peers::AskError;

/// A lease under a VM that an agent borrowed.
#[derive(Clone, Debug)]
struct Lent {
    lender: HostName,
    lease: LeaseId,
    generation: u32,
}

/// A VM that is to move.
#[derive(Clone, Debug)]
pub(super) struct Offered {
    arrive: Arrive,
    leases: Vec<Lent>,
}

impl Offered {
    /// Takes the VM with this memory.
    pub(super) fn new(arrive: Arrive, memory: &RegionSpec) -> Self {
        let borrowed = memory.leases.iter().filter(|target| borrower::is_borrowed(target));
        let lent = borrowed.map(|target| Lent {
            lender: target.lender.clone(),
            lease: target.lease,
            generation: borrower::generation(target),
        });
        Self { arrive, leases: lent.collect() }
    }

    /// Returns the hosts that lend some of the VM's memory. They cannot lend to themselves.
    pub(super) fn lenders(&self) -> impl Iterator<Item = HostName> {
        self.leases.iter().map(|lent| lent.lender.clone())
    }

    /// Returns up to where the host that takes the VM may use its memory then.
    pub(super) fn below(&self) -> Threshold {
        self.arrive.below.unwrap_or(Threshold::Upper)
    }
}

impl Inner {
    /// Asks a host to wait for a VM.
    ///
    /// # Errors
    /// [`AskError::Refused`] if the host surely does not wait.
    pub(super) async fn ask(&self, to: &HostName, vm: &Offered) -> Result<Awaits, AskError> {
        if vm.lenders().any(|lender| lender == *to) {
            let error = format!("{to} lends some of the VM's memory, and cannot lend to itself");
            let help = Some("name another host with --to".to_owned());
            return Err(AskError::Refused(Problem { error, help }));
        }
        for lent in &vm.leases {
            self.permit(to, lent).await.map_err(AskError::Refused)?;
        }
        self.peers.ask(to, path::ARRIVE, &vm.arrive).await
    }

    /// Asks a lender to let another host use its lease.
    async fn permit(&self, to: &HostName, lent: &Lent) -> Result<(), Problem> {
        let Lent { lender, lease, generation } = lent.clone();
        let permit = Permit { lease, generation, to: to.clone() };
        match self.peers.ask::<Done>(&lender, path::PERMIT, &permit).await {
            Ok(Done {}) => Ok(()),
            Err(AskError::Refused(problem) | AskError::Lost(problem)) => Err(Problem {
                error: format!(
                    "{lender}, which lends some of the VM's memory, does not let {to} use it: {}",
                    problem.error
                ),
                help: problem.help,
            }),
        }
    }
}
