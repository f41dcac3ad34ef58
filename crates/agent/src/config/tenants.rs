//! Settings for what runs here for tenants: VMs and groups.

use std::path::PathBuf;
use std::time::Duration;

use aquifer_control::balance;
use aquifer_vm::definition::DIRECTORY;
use serde::Deserialize;

use super::duration_or_never;

/// Settings for VMs: starting them, taking them from other hosts, and balancing their memory.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VmsConfig {
    /// Directory of the definitions of VMs, which the agent starts.
    pub dir: PathBuf,
    /// Whether the agent takes VMs. A peer that moves a VM here controls a QEMU process on this
    /// host.
    pub accept: bool,
    /// QEMU's program, by name or path.
    pub qemu: PathBuf,
    /// Whether the agent moves memory between this host's VMs to those that need it.
    pub balance: bool,
    /// How long this host is overloaded until a VM moves to another one; `None` for never.
    #[serde(deserialize_with = "duration_or_never")]
    pub move_after: Option<Duration>,
    /// Settings of that balancer.
    pub balancer: balance::Config,
}

impl Default for VmsConfig {
    fn default() -> Self {
        Self {
            dir: DIRECTORY.into(),
            accept: false,
            qemu: "qemu-system-x86_64".into(),
            balance: false,
            move_after: Some(Duration::from_secs(300)),
            balancer: balance::Config::default(),
        }
    }
}

/// Settings for the groups of this host.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GroupsConfig {
    /// Directory of the groups' agreements.
    pub agreements: PathBuf,
    /// Whether the agent hands out the memory that groups save.
    pub balance: bool,
    /// Whether the agent runs a scanner for each group with regions here. An operator makes a
    /// group for the sake of sharing, and a scanner takes CPU that no other program wants.
    pub scan: bool,
}

impl Default for GroupsConfig {
    fn default() -> Self {
        Self { agreements: "/etc/aquifer/groups".into(), balance: false, scan: true }
    }
}
