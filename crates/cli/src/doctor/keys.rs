//! The check of the keys of this host's leases, which its agent replaces as they get old.

use std::time::Duration;

use aquifer_agent::config::Config;
use aquifer_api::status::{Held, Status};
use aquifer_page::LeaseId;

use super::Check;
use crate::agent_call::status_at;

/// Checks the ages of keys; `None` if keys may get old, no agent answers, or there is no key.
pub(super) fn check(config: &Config) -> Option<Check> {
    let lifetime = config.borrow.key_lifetime?;
    let status = status_at(&config.socket).filter(|status| status.host == config.host)?;
    let (lease, age) = oldest(&status)?;
    Some(judge(lease, age, lifetime))
}

/// Returns the lease with the oldest key.
fn oldest(status: &Status) -> Option<(LeaseId, Duration)> {
    let volumes = status.loans.borrowed.iter().flat_map(|volume| &volume.leases);
    let regions = status.loans.regions.iter().flat_map(|region| &region.leases);
    let age = |held: &Held| {
        let age = Duration::try_from_secs_f64(held.key_age_s?).ok()?;
        Some((held.lease, age))
    };
    volumes.chain(regions).filter_map(age).max_by_key(|(_, age)| *age)
}

/// Judges the oldest key. The agent replaces keys before the end of their lifetime.
fn judge(lease: LeaseId, age: Duration, lifetime: Duration) -> Check {
    const NAME: &str = "keys of leases";
    let found = format!("the oldest is {} old, of at most {}", text(age), text(lifetime));
    if age <= lifetime + lifetime / 4 {
        return Check::ok(NAME, found);
    }
    let help = format!(
        "'aquifer why {lease}' tells what keeps the agent from replacing it: often no lender has \
         room; then let more hosts lend, or raise borrow.key_lifetime"
    );
    Check::warn(NAME, found, help)
}

/// Returns a time in its largest unit, as the configuration takes it.
fn text(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn a_key_much_older_than_its_lifetime_is_a_warning() {
        let day = Duration::from_secs(86_400);
        let judged = |age| judge(LeaseId(7), age, day * 30);
        assert_eq!(judged(day * 31).verdict, Verdict::Ok);
        let old = judged(day * 45 + Duration::from_secs(7));
        assert_eq!(old.verdict, Verdict::Warn);
        assert_eq!(old.found, "the oldest is 45d old, of at most 30d");
        assert!(old.help.unwrap().contains(&LeaseId(7).to_string()));
    }
}
