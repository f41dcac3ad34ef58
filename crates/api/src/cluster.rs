//! What the hosts of a cluster tell each other about their memory, for one table of all hosts.

use std::collections::BTreeMap;

use aquifer_control::Role;
use aquifer_page::{Bytes, HostName, Zone};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::schema;
use crate::status::{Certificate, Ledger, Peer};

/// What a host tells another host of its cluster about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Summary {
    /// The host.
    #[schema(value_type = schema::Name)]
    pub host: HostName,
    /// The address at which other hosts reach the agent.
    pub address: String,
    /// Whether the host can admit others to its cluster.
    pub admits: bool,
    /// The zone that the host is in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Name>)]
    pub zone: Option<Zone>,
    /// How long the host's certificate holds. Absent at agents of older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<Certificate>,
    /// The agent's version.
    pub version: String,
    /// The present role.
    pub role: Role,
    /// The account of all memory by class.
    pub ledger: Ledger,
    /// The capacity of the leases that the host has granted, by borrower.
    #[schema(value_type = BTreeMap<String, schema::Size>)]
    pub lent: BTreeMap<HostName, Bytes>,
    /// The capacity of the leases that the host holds, by lender.
    #[schema(value_type = BTreeMap<String, schema::Size>)]
    pub borrowed: BTreeMap<HostName, Bytes>,
    /// The number of VMs. Absent if the agent cannot list them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vms: Option<u32>,
    /// Whether tasks wait for memory, by PSI.
    pub pressure: bool,
    /// Whether an operator drains the host.
    pub draining: bool,
}

/// A host of the cluster: what the asked host knows about it, and its own answer.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct ClusterHost {
    /// What the asked host knew before it called the host. The error is of that call.
    #[serde(flatten)]
    pub peer: Peer,
    /// The host's answer. Absent without a right one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub summary: Option<Summary>,
}
