//! The memory that the agent watches, and the thresholds at which it acts.

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

/// The memory that the agent watches, and the thresholds at which it acts.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MemoryConfig {
    /// Memory cgroup (v1 or v2) to manage instead of the whole host, as a path under
    /// `/sys/fs/cgroup`.
    pub cgroup: Option<PathBuf>,
    /// Whether that cgroup may swap only while this agent has a borrowed device on. Swap devices
    /// belong to the whole kernel: without this, the cgroup also uses devices that agents of other
    /// cgroups borrowed.
    pub gate_swap: bool,
    /// Monitoring period, 50 ms to 1 min.
    #[serde(deserialize_with = "super::duration")]
    pub period: Duration,
    /// T_upper: the agent borrows above this share of M_t.
    pub upper: f64,
    /// T_lower: the agent returns memory if used memory plus borrowed swap is below this share of
    /// M_t.
    pub lower: f64,
    /// Share of time that tasks may wait for memory (PSI "some") before memory counts as short; 0
    /// turns the check off.
    pub pressure: f64,
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self {
            cgroup: None,
            gate_swap: false,
            period: Duration::from_secs(1),
            upper: 0.8,
            lower: 0.6,
            pressure: 0.1,
        }
    }
}

impl MemoryConfig {
    pub(super) fn validate(&self) -> Result<(), String> {
        let Self { upper, lower, pressure, period, .. } = *self;
        if !(0.0 < lower && lower < upper && upper < 1.0) {
            return Err(format!(
                "[memory] lower = {lower} and upper = {upper} must be 0 < lower < upper < 1"
            ));
        }
        if self.gate_swap && self.cgroup.is_none() {
            return Err(
                "[memory] gate_swap = true needs a cgroup: set one, or remove gate_swap".to_owned()
            );
        }
        if !(0.0..1.0).contains(&pressure) {
            return Err(format!(
                "[memory] pressure = {pressure} must be a share of time from 0 (off) to below 1"
            ));
        }
        let period_ms = Duration::from_millis(50)..=Duration::from_millis(60_000);
        if !period_ms.contains(&period) {
            return Err(format!(
                "[memory] period = {} must be between 50ms and 1m",
                humantime::format_duration(period)
            ));
        }
        Ok(())
    }
}
