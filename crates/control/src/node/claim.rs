//! The check before a VM, a region or an export of this host gets memory.

use aquifer_page::Bytes;

use super::{Answer, Node, Problem, Ticket};
use crate::Subject;
use crate::ledger::{Claim, Ledger, OwnMemory, Purpose, Shortage};

impl Node {
    /// Takes a reading of what this host promises. Claims that it does not show yet still count.
    pub(super) fn note_own(&mut self, read: OwnMemory) {
        self.own.claims.settle(&read, self.now);
        self.own.read = read;
        self.note_claims();
    }

    /// Passes to the controller what this host promises by its reading and the present claims.
    pub(super) fn note_claims(&mut self) {
        self.controller.note_own(self.own.claims.over(&self.own.read));
    }

    /// Promises memory to a VM, a region or an export, if that breaks no other promise. The claim
    /// counts until a reading shows it, so that two commands do not get the same memory.
    pub(super) fn claim(&mut self, claim: Claim, overcommit: bool, ticket: Ticket) {
        // A claim of the same command that came twice counts once.
        let former = self.own.claims.take(claim.purpose, &claim.name);
        self.note_claims();
        let refusal = match claim.bytes {
            Bytes::ZERO => None,
            _ => self.refusal(&claim).filter(|_| !overcommit),
        };
        match (&refusal, former) {
            (Some(_), Some(former)) => self.own.claims.put_back(former),
            (None, _) if claim.bytes > Bytes::ZERO => self.own.claims.note(claim, self.now),
            _ => {}
        }
        self.note_claims();
        let answer = refusal.map_or(Answer::Claimed, Answer::Failed);
        self.answer(ticket, answer);
    }

    /// Compares the present promises with those after a claim.
    ///
    /// # Errors
    /// If the agent knows nothing of its memory yet.
    pub(super) fn shortage(&self, claim: &Claim) -> Result<Option<Shortage>, Problem> {
        let mut after = self.controller.own().clone();
        claim.add_to(&mut after);
        let (before, after) = (self.controller.ledger(), self.controller.ledger_with(after));
        let promises = |ledger: &Ledger| (ledger.promised(), ledger.overcommitted);
        if promises(&after) == promises(&before) {
            return Ok(None);
        }
        if self.controller.memory().total == Bytes::ZERO {
            let error = "the agent has only just started, and has not read its memory yet";
            return Err(Problem { error: error.to_owned(), help: Some("try again".to_owned()) });
        }
        Ok(Shortage::between(&before, &after, self.controller.recallable()))
    }

    fn refusal(&mut self, claim: &Claim) -> Option<Problem> {
        let shortage = match self.shortage(claim) {
            Ok(shortage) => shortage?,
            Err(problem) => return Some(problem),
        };
        let what = format!("refuses memory to {}: {shortage}", claim.name);
        let name = claim.name.clone();
        let subject = match claim.purpose {
            Purpose::Vm => vec![Subject::Vm(name)],
            Purpose::Cache => vec![Subject::Region(name)],
            // It ends with its process, so nobody asks for it by its name.
            Purpose::Export => Vec::new(),
        };
        self.log(what, subject);
        Some(Problem { error: shortage.to_string(), help: Some(shortage.help()) })
    }
}
