//! The check before a VM or a region of this host gets memory.

use aquifer_page::Bytes;

use super::{Answer, Node, Problem, Ticket};
use crate::Subject;
use crate::ledger::{Claim, OwnMemory, Purpose, Shortage};

impl Node {
    /// Takes a reading of what this host promises. Claims that it does not show yet still count.
    pub(super) fn note_own(&mut self, read: OwnMemory) {
        self.own.claims.settle(&read, self.now);
        self.own.read = read;
        self.controller.note_own(self.own.claims.over(&self.own.read));
    }

    /// Promises memory to a VM or a region, if that breaks no other promise. The claim counts until
    /// a reading shows it, so that two commands do not get the same memory.
    pub(super) fn claim(&mut self, claim: Claim, overcommit: bool, ticket: Ticket) {
        // A claim of the same command that came twice counts once.
        let former = self.own.claims.take(claim.purpose, &claim.name);
        let before = self.own.claims.over(&self.own.read);
        let refusal = match claim.bytes {
            Bytes::ZERO => None,
            _ => self.refusal(&claim, before).filter(|_| !overcommit),
        };
        match (&refusal, former) {
            (Some(_), Some(former)) => self.own.claims.put_back(former),
            (None, _) if claim.bytes > Bytes::ZERO => self.own.claims.note(claim, self.now),
            _ => {}
        }
        self.controller.note_own(self.own.claims.over(&self.own.read));
        let answer = refusal.map_or(Answer::Claimed, Answer::Failed);
        self.answer(ticket, answer);
    }

    fn refusal(&mut self, claim: &Claim, before: OwnMemory) -> Option<Problem> {
        if self.controller.memory().total == Bytes::ZERO {
            let error = "the agent has only just started, and has not read its memory yet";
            return Some(Problem { error: error.to_owned(), help: Some("try again".to_owned()) });
        }
        let mut after = before.clone();
        claim.add_to(&mut after);
        let (before, after) =
            (self.controller.ledger_with(before), self.controller.ledger_with(after));
        let shortage = Shortage::between(&before, &after, self.controller.recallable())?;
        let what = format!("refuses memory to {}: {shortage}", claim.name);
        let name = claim.name.clone();
        let subject = match claim.purpose {
            Purpose::Vm => Subject::Vm(name),
            Purpose::Cache => Subject::Region(name),
        };
        self.log(what, vec![subject]);
        Some(Problem { error: shortage.to_string(), help: Some(shortage.help()) })
    }
}
