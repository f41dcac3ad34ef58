//! VMs that come from other hosts: the ledger has room for them, or they stay where they are.

use aquifer_page::{Bytes, HostName, RegionName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Node;
use crate::Subject;
use crate::ledger::{Claim, Purpose};
use crate::node::{Answer, Problem, Ticket};

/// A threshold of the memory of a host, up to which it takes VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Threshold {
    /// T_upper: the host is not overloaded if it uses all that it promises.
    Upper,
    /// T_lower, for a VM that leaves an overloaded host. The gap to T_upper keeps the VM from soon
    /// leaving the next host, too.
    Lower,
}

impl Node {
    /// Promises memory to the cache of a VM that is about to come. Without `below`, an operator
    /// chose this host, and only promises count.
    pub(in crate::node) fn take_vm(
        &mut self,
        from: &HostName,
        claim: Claim,
        below: Option<Threshold>,
        ticket: Ticket,
    ) {
        let vm = claim.name.clone();
        // An offer that came twice counts once.
        let former = self.own.claims.take(claim.purpose, &vm);
        self.note_claims();
        let (what, answer) = match self.room_for_vm(&claim, below) {
            Ok(why) => {
                if claim.bytes > Bytes::ZERO {
                    self.own.claims.note(claim, self.now);
                }
                (format!("takes VM {vm} from {from}: {why}"), Answer::Claimed)
            }
            Err(problem) => {
                former.into_iter().for_each(|former| self.own.claims.put_back(former));
                let what = format!("refuses VM {vm} of {from}: {}", problem.error);
                (what, Answer::Failed(problem))
            }
        };
        self.note_claims();
        self.log(what, vec![Subject::Vm(vm), Subject::Host(from.clone())]);
        self.answer(ticket, answer);
    }

    /// Ends the promise to a VM that does not come.
    pub(in crate::node) fn lose_vm(&mut self, from: &HostName, vm: RegionName, why: &str) {
        self.own.claims.take(Purpose::Cache, &vm);
        self.note_claims();
        let what = format!("does not take VM {vm} of {from}: {why}");
        self.log(what, vec![Subject::Vm(vm), Subject::Host(from.clone())]);
    }

    fn room_for_vm(&self, claim: &Claim, below: Option<Threshold>) -> Result<String, Problem> {
        let Claim { bytes, .. } = claim;
        let host = &self.controller.facts().host;
        if !self.admits_vms() {
            return Err(Problem {
                error: format!("host {host} is draining, and takes no VMs"),
                help: Some(
                    "choose another host, or end the drain there with 'aquifer host undrain'"
                        .to_owned(),
                ),
            });
        }
        if *bytes == Bytes::ZERO {
            return Ok("this host's ledger does not count its memory".to_owned());
        }
        let shortage = self.shortage(claim)?;
        let Some(below) = below else {
            return match shortage {
                None => Ok(format!("its cache may take {bytes}, and an operator chose this host")),
                Some(shortage) => Err(unfit(shortage.to_string())),
            };
        };
        let (room, limit) = (self.room_below(below), self.limit(below));
        match *bytes <= room {
            true => Ok(format!("its cache may take {bytes}, and {room} fit below {limit}")),
            false => {
                Err(unfit(format!("its cache may take {bytes}, and only {room} fit below {limit}")))
            }
        }
    }

    pub(in crate::node) fn room_below(&self, threshold: Threshold) -> Bytes {
        self.controller.room_below(self.share(threshold))
    }

    fn share(&self, threshold: Threshold) -> f64 {
        let config = &self.controller.facts().config;
        match threshold {
            Threshold::Upper => config.upper,
            Threshold::Lower => config.lower,
        }
    }

    fn limit(&self, threshold: Threshold) -> String {
        let limit = self.own.memory.total.scaled(self.share(threshold));
        match threshold {
            Threshold::Upper => format!("T_upper, {limit}"),
            Threshold::Lower => format!("T_lower, {limit}"),
        }
    }
}

fn unfit(error: String) -> Problem {
    let help = "choose another host with --to, or a smaller cache with --cache".to_owned();
    Problem { error, help: Some(help) }
}
