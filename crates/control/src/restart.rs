//! The decision when a VM with a definition starts: at boot, and again after an end.
//!
//! [`Restarts`] takes what a look at the VMs found and returns [`Step`]s. A VM that fails again and
//! again waits longer each time, from [`FIRST_DELAY`] to [`LONGEST_DELAY`]; a VM that ran for
//! [`SETTLED`] begins anew. At most [`MOST_STARTS`] VMs start at a time, in order of their names.
//! While its host drains, no VM starts for the first time since the boot.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use aquifer_page::RegionName;
use serde::{Deserialize, Serialize};

/// The wait before the first restart.
pub const FIRST_DELAY: Duration = Duration::from_secs(1);

/// The longest wait before a restart.
pub const LONGEST_DELAY: Duration = Duration::from_secs(60);

/// After this time of running, the next failure counts as the first one.
pub const SETTLED: Duration = Duration::from_secs(600);

/// Most VMs that start at a time: each start loads the host.
pub const MOST_STARTS: usize = 2;

/// When a VM starts again after an end that the operator did not order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// After a failure: not if the guest powered itself off.
    #[default]
    OnFailure,
    /// After each end.
    Always,
    /// Never.
    No,
}

/// The reason why a text is not a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsePolicyError(String);

impl fmt::Display for ParsePolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "'{}' is no restart policy: write on-failure, always or no", self.0)
    }
}

impl std::error::Error for ParsePolicyError {}

impl FromStr for Policy {
    type Err = ParsePolicyError;

    fn from_str(text: &str) -> Result<Self, ParsePolicyError> {
        let all = [Self::OnFailure, Self::Always, Self::No];
        let found = all.into_iter().find(|policy| policy.as_str() == text);
        found.ok_or_else(|| ParsePolicyError(text.to_owned()))
    }
}

impl Policy {
    /// Returns the word for the policy in definitions and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::OnFailure => "on-failure",
            Self::Always => "always",
            Self::No => "no",
        }
    }

    /// Returns whether a VM starts again after such an end.
    fn restarts(self, end: End) -> bool {
        match (self, end) {
            (_, End::Ordered) | (Self::No, _) | (Self::OnFailure, End::PoweredOff) => false,
            (Self::Always, _) | (Self::OnFailure, End::Failed) => true,
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// How a VM ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// An operator's command ended it.
    Ordered,
    /// The guest powered itself off.
    PoweredOff,
    /// QEMU was killed, failed, or ended unseen.
    Failed,
}

/// What a look at a VM found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// The VM runs here.
    Runs,
    /// A command, a supervisor or a migration changes the VM at the moment.
    Busy,
    /// The VM stays off until an operator starts it, or another host owns it.
    Rests,
    /// The VM is off, and has no end on record since the host booted.
    Never,
    /// The VM is off since this end.
    Ended(End),
}

impl Seen {
    /// Returns whether the VM is off and may start. A VM that ran starts again on a host that
    /// drains, too: only so the drain can move it.
    fn may_start(self, drains: bool) -> bool {
        match self {
            Self::Never => !drains,
            Self::Ended(_) => true,
            Self::Runs | Self::Busy | Self::Rests => false,
        }
    }
}

/// A look at a VM with a definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// When the VM starts again.
    pub policy: Policy,
    /// Whether the VM starts when the host boots.
    pub autostart: bool,
    /// What the look found.
    pub seen: Seen,
}

/// A decision about a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Start the VM now, and report the outcome to [`Restarts::started`].
    Start,
    /// The VM starts again after this time.
    Wait(Duration),
    /// Record that the VM stays off until an operator starts it or the host boots.
    Rest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No look has found anything yet.
    New,
    Runs {
        since: Duration,
    },
    /// Off, and to be started at this time.
    Waits {
        until: Duration,
    },
    /// Ordered to start; the outcome is open.
    Starts,
    /// Off, by the definition or by an operator.
    Rests,
}

#[derive(Clone, Copy, Debug)]
struct Vm {
    state: State,
    /// Failures since the VM last ran for long.
    failures: u32,
}

/// The machine that starts the VMs of a host.
#[derive(Clone, Debug, Default)]
pub struct Restarts {
    vms: BTreeMap<RegionName, Vm>,
}

impl Restarts {
    /// Decides after a look at all VMs with definitions. `now` never goes back. `drains` says
    /// whether the operator empties this host.
    pub fn step(
        &mut self,
        now: Duration,
        looks: &BTreeMap<RegionName, Look>,
        drains: bool,
    ) -> Vec<(RegionName, Step)> {
        self.vms.retain(|name, vm| vm.state == State::Starts || looks.contains_key(name));
        let mut steps = Vec::new();
        for (name, look) in looks {
            let new = Vm { state: State::New, failures: 0 };
            let vm = self.vms.entry(name.clone()).or_insert(new);
            steps.extend(vm.look(now, *look).map(|step| (name.clone(), step)));
        }
        let starting = self.vms.values().filter(|vm| vm.state == State::Starts).count();
        let due = looks.iter().filter(|(name, look)| {
            let is_due = self.vms.get(*name).is_some_and(|vm| vm.is_due(now));
            is_due && look.seen.may_start(drains)
        });
        let due: Vec<_> = due.map(|(name, _)| name.clone()).collect();
        for name in due.into_iter().take(MOST_STARTS.saturating_sub(starting)) {
            self.vms.entry(name.clone()).and_modify(|vm| vm.state = State::Starts);
            steps.push((name, Step::Start));
        }
        steps
    }

    /// Notes the outcome of a start. Returns the time until the next attempt if it failed.
    pub fn started(&mut self, now: Duration, name: &RegionName, runs: bool) -> Option<Duration> {
        let vm = self.vms.get_mut(name).filter(|vm| vm.state == State::Starts)?;
        if runs {
            vm.state = State::Runs { since: now };
            return None;
        }
        Some(vm.wait(now))
    }
}

impl Vm {
    fn look(&mut self, now: Duration, Look { policy, autostart, seen }: Look) -> Option<Step> {
        match (seen, self.state) {
            (_, State::Starts) | (Seen::Busy, _) => None,
            (Seen::Runs, State::Runs { .. }) => None,
            (Seen::Runs, _) => {
                self.state = State::Runs { since: now };
                None
            }
            (Seen::Rests, _) => {
                *self = Self { state: State::Rests, failures: 0 };
                None
            }
            (Seen::Never | Seen::Ended(_), State::Waits { .. }) => None,
            (Seen::Never, State::New) => {
                self.state = if autostart { State::Waits { until: now } } else { State::Rests };
                None
            }
            (Seen::Never, State::Rests) => None,
            // The record of its end is lost.
            (Seen::Never, State::Runs { .. }) => self.ended(now, policy, End::Failed),
            (Seen::Ended(end), _) => self.ended(now, policy, end),
        }
    }

    fn ended(&mut self, now: Duration, policy: Policy, end: End) -> Option<Step> {
        if let State::Runs { since } = self.state
            && now.saturating_sub(since) >= SETTLED
        {
            self.failures = 0;
        }
        if policy.restarts(end) {
            return Some(Step::Wait(self.wait(now)));
        }
        *self = Self { state: State::Rests, failures: 0 };
        Some(Step::Rest)
    }

    /// Waits before the next start, longer after each failure. Returns the wait.
    fn wait(&mut self, now: Duration) -> Duration {
        let delay = FIRST_DELAY.saturating_mul(1 << self.failures.min(16)).min(LONGEST_DELAY);
        self.failures = self.failures.saturating_add(1);
        self.state = State::Waits { until: now + delay };
        delay
    }

    fn is_due(&self, now: Duration) -> bool {
        matches!(self.state, State::Waits { until } if until <= now)
    }
}
