//! `aquifer host rotate-keys`.

use std::process::ExitCode;
use std::time::Duration;

use aquifer_api::order::{RotateKeys as Order, RotatesKeys};
use aquifer_api::path;
use aquifer_page::LeaseId;
use clap::Args;

use crate::agent_call::Socket;
use crate::commands::Common;
use crate::failure::Result;
use crate::manual::Manual;
use crate::output;

/// Replace the keys of this host's leases
///
/// This host encrypts the pages in each lease that it borrows under a key of its own. To replace
/// the key, the agent borrows for the pages, moves them there while programs run, and gives the
/// lease back. It does so by itself when a key is as old as 'borrow.key_lifetime' says. This
/// command orders it now, and does not wait: the agent replaces one lease after the other, while
/// nothing else moves and lenders have room.
#[derive(Debug, Args)]
pub struct RotateKeys {
    /// Replace only the key of this lease; default all
    ///
    /// 'aquifer status --json' lists the leases with the ages of their keys.
    #[arg(long, value_name = "ID")]
    lease: Option<LeaseId>,
    #[command(flatten)]
    socket: Socket,
}

pub(super) const MANUAL: Manual = Manual {
    examples: &[
        ("aquifer host rotate-keys", "Replace the keys of all leases of this host"),
        ("aquifer why 0123456789abcdef0123456789abcdef", "See what became of one of the leases"),
    ],
    notes: &[(
        "Which keys",
        "A group with 'deterministic' encryption has one key, which stays. Leases that the kernel \
         attaches itself have none. docs/explain/security.md lists all keys.",
    )],
    see_also: &["aquifer-status(1)", "aquifer-why(1)", "aquifer-host-borrow(1)"],
    ..Manual::NONE
};

/// How long the agent may take to answer.
const LIMIT: Duration = Duration::from_secs(10);

impl RotateKeys {
    /// Orders the agent to replace keys.
    ///
    /// # Errors
    /// If the agent does not answer, or the lease has no key that can be replaced.
    pub fn run(self, common: &Common) -> Result<ExitCode> {
        let agent = self.socket.agent(common)?;
        let order = Order { lease: self.lease };
        let answer: RotatesKeys = agent.call("replacing keys", LIMIT, async |client| {
            client.post(path::ROTATE_KEYS, &order).await
        })?;
        output::answer(common.json, &answer, text)?;
        Ok(ExitCode::SUCCESS)
    }
}

fn text(answer: &RotatesKeys) -> String {
    let Some(first) = answer.leases.first() else {
        return "no lease of this host has a key of its own".to_owned();
    };
    let leases: Vec<_> = answer.leases.iter().map(ToString::to_string).collect();
    format!(
        "the agent replaces these leases, one after the other:\n{}\nfollow it with \
         'aquifer why {first}'",
        leases.join("\n")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_names_the_leases_and_where_to_look() {
        let said = text(&RotatesKeys { leases: vec![LeaseId(1), LeaseId(2)] });
        let (one, two) = (LeaseId(1).to_string(), LeaseId(2).to_string());
        assert!(said.contains(&two) && said.ends_with(&format!("'aquifer why {one}'")), "{said}");
        assert!(text(&RotatesKeys { leases: Vec::new() }).contains("no lease"));
    }
}
