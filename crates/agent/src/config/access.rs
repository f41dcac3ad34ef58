//! Settings for people besides root.

use serde::Deserialize;

/// The unix groups whose members may use the agent's socket. Root may do all.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AccessConfig {
    /// May read: status, hosts, groups.
    pub read: Vec<String>,
    /// May also order: borrow, return, drain, migrate.
    pub operate: Vec<String>,
    /// May also change the membership of the cluster.
    pub admin: Vec<String>,
}

impl AccessConfig {
    /// Returns whether anybody besides root may use the socket.
    pub fn is_open(&self) -> bool {
        !(self.read.is_empty() && self.operate.is_empty() && self.admin.is_empty())
    }
}
