//! `aquifer why`.

use std::collections::BTreeSet;
use std::process::ExitCode;

use aquifer_api::status::{Decision, Status, Subject, SubjectKind};
use aquifer_vm::process::client as vms;
use clap::Args;

use super::Common;
use super::group::disputes;
use crate::agent_call::Socket;
use crate::failure::{Failure, Result};
use crate::manual::Manual;
use crate::output;
use crate::view;

/// Explain the agent's latest decisions
///
/// Shows the latest decisions that concern a host, a VM, a region, a group, a lease or a volume,
/// newest last, each with its time and numbers. The agent keeps 200 decisions until it ends, and
/// its log keeps all.
#[derive(Debug, Args)]
pub struct Why {
    /// Name of a host, a VM, a region or a group, or id of a lease or a volume
    ///
    /// The name of this host stands for all decisions, as no name does.
    name: Option<String>,
    #[command(flatten)]
    socket: Socket,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer why", "Show the latest decisions"),
        ("aquifer why b", "Explain what this host asked of host b, gave it and refused it"),
        ("aquifer why web --json", "Show the decisions about a VM to a program"),
    ],
    see_also: &["aquifer-status(1)", "aquifer-serve-agent(1)"],
    ..Manual::NONE
};

impl Why {
    /// Shows the decisions about a name.
    ///
    /// # Errors
    /// If the agent does not answer, or knows nothing of this name.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let agent = self.socket.agent(common)?;
        let mut status = agent.status("asking for the decisions")?;
        let name = self.name.filter(|name| *name != status.host.as_str());
        if name.is_some() {
            // They last, and the decisions about them may be gone.
            status.history.decisions.extend(disputes(&agent));
        }
        let known = known(&status, common);
        if let Some(name) = &name
            && !known.iter().any(|subject| subject.name == *name)
        {
            let why = "this host knows no host, VM, region, group, lease or volume of this name";
            let failure = Failure::new(format!("explaining '{name}'"), why);
            return Err(failure.help(names(&status, &known)));
        }
        let about = |decision: &Decision| {
            let names = |name: &String| decision.about.iter().any(|one| one.name == *name);
            name.as_ref().is_none_or(names)
        };
        let decisions: Vec<_> = status.history.decisions.into_iter().filter(about).collect();
        output::answer(common.json, &decisions, |decisions| text(decisions))?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Returns what this host knows of, besides itself: from its agent's status, and the VMs here.
fn known(status: &Status, common: &Common) -> BTreeSet<Subject> {
    let Status { loans, history, .. } = status;
    let of = |kind, name: &dyn ToString| Subject { kind, name: name.to_string() };
    let mut known: BTreeSet<_> =
        history.decisions.iter().flat_map(|decision| decision.about.clone()).collect();
    known.extend(status.peers.iter().map(|peer| of(SubjectKind::Host, &peer.host)));
    for lent in &loans.lent {
        known.insert(of(SubjectKind::Lease, &lent.lease));
        known.insert(of(SubjectKind::Host, &lent.borrower));
        known.extend(lent.region.iter().map(|region| of(SubjectKind::Region, region)));
    }
    for volume in &loans.borrowed {
        known.insert(of(SubjectKind::Volume, &volume.volume));
    }
    for region in &loans.regions {
        known.insert(of(SubjectKind::Region, &region.region));
        known.insert(of(SubjectKind::Volume, &region.volume));
    }
    let swap = loans.borrowed.iter().flat_map(|volume| &volume.leases);
    for held in swap.chain(loans.regions.iter().flat_map(|region| &region.leases)) {
        known.insert(of(SubjectKind::Lease, &held.lease));
        known.insert(of(SubjectKind::Host, &held.lender));
    }
    known.extend(status.scanners.iter().map(|scanner| of(SubjectKind::Group, &scanner.group)));
    let vms = vms::list(&common.run_dir).unwrap_or_default();
    known.extend(vms.iter().map(|files| of(SubjectKind::Vm, files.name())));
    known
}

/// Returns a text that lists the names, by kind.
fn names(status: &Status, known: &BTreeSet<Subject>) -> String {
    let kinds = [
        (SubjectKind::Host, "hosts"),
        (SubjectKind::Vm, "VMs"),
        (SubjectKind::Lease, "leases"),
        (SubjectKind::Volume, "volumes"),
        (SubjectKind::Region, "regions"),
        (SubjectKind::Group, "groups"),
    ];
    let own = (SubjectKind::Host, status.host.to_string());
    let list = |(kind, plural): (SubjectKind, &str)| {
        let known = known.iter().map(|subject| (subject.kind, subject.name.clone()));
        let of_kind = std::iter::once(own.clone()).chain(known).filter(|(one, _)| *one == kind);
        let names: Vec<_> = of_kind.map(|(_, name)| name).collect();
        (!names.is_empty()).then(|| format!("{plural}: {}", names.join(", ")))
    };
    format!(
        "give one of these; {}",
        kinds.into_iter().filter_map(list).collect::<Vec<_>>().join("; ")
    )
}

fn text(decisions: &[Decision]) -> String {
    if decisions.is_empty() {
        return "no decision about it since the agent started".to_owned();
    }
    decisions.iter().map(view::decision).collect::<Vec<_>>().join("\n")
}
