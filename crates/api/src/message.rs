//! The five messages of \[Ge23\] ("Signaling of Events", Figs. 4 and 5), and the other messages
//! between hosts.
//!
//! Each request is a `POST` to the path of its name, except for [`Offer`] and [`Access`], which
//! answer a `GET`. An answer of 200 means that the receiver has accepted the message and will not
//! forget it. After any other answer the sender must send the message again. The receiver accepts
//! duplicates.

use std::fmt;
use std::net::SocketAddr;

use aquifer_control::node::Threshold;
use aquifer_control::{Reason, RequestId};
use aquifer_page::{Bytes, Group, HostName, LeaseId, RegionName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::schema;

/// Borrower to lender: "lend me `bytes`". The lender answers with [`MemBorAck`] or [`MemBorRej`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemBorReq {
    /// An id chosen by the borrower, 32 hexadecimal digits. A repeated request yields the same
    /// lease.
    #[schema(value_type = schema::Id)]
    pub request: RequestId,
    /// M_req, in whole extents of 64 MiB.
    #[schema(value_type = schema::Size)]
    pub bytes: Bytes,
    /// The borrower's region that the lease is for. Absent if it is for swap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Name>)]
    pub region: Option<RegionName>,
    /// The tenant that the lender accounts the lease to.
    #[schema(value_type = schema::Name)]
    pub group: Group,
    /// Whether the lease is for second copies, which the lender takes back before anything else.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub goes_first: bool,
}

/// Lender to borrower: the request is granted, and these URIs reach the memory. The lender repeats
/// it to a silent borrower, as the question "do you still hold this lease?".
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemBorAck {
    /// The request that this answers.
    #[schema(value_type = schema::Id)]
    pub request: RequestId,
    /// The lease. Its id is also the name of its NBD export and, as a UUID, of its NVMe subsystem.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
    /// The capacity of the lease.
    #[schema(value_type = schema::Size)]
    pub bytes: Bytes,
    /// The URIs that reach its pages, one for each protocol: `nbds://HOST:PORT/LEASE`,
    /// `nvme+tcp://HOST:PORT/NQN`, `nvme+rdma://HOST:PORT/NQN`. The last two also need [`Access`].
    pub uris: Vec<String>,
    /// How often the lease has moved to another host with its region. Absent if never.
    #[serde(default, skip_serializing_if = "is_first")]
    #[schema(format = "uint32", maximum = 4_294_967_295_u64)]
    pub generation: u32,
}

/// Lender to borrower: the request is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemBorRej {
    /// The request that this answers.
    #[schema(value_type = schema::Id)]
    pub request: RequestId,
    /// The bytes that the lender could spare at that moment.
    #[schema(value_type = schema::Size)]
    pub spare: Bytes,
    /// The reason.
    pub reason: Reason,
}

/// Borrower to lender: I no longer use this lease, free its memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemBorFin {
    /// The lease.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
    /// The generation that the borrower held. Absent if the lease has never moved to another host.
    #[serde(default, skip_serializing_if = "is_first")]
    #[schema(format = "uint32", maximum = 4_294_967_295_u64)]
    pub generation: u32,
}

/// Lender to borrower: move your pages elsewhere and give the lease back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemLenFin {
    /// The lease.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
    /// The lease's generation. Absent if the lease has never moved to another host.
    #[serde(default, skip_serializing_if = "is_first")]
    #[schema(format = "uint32", maximum = 4_294_967_295_u64)]
    pub generation: u32,
}

/// Borrower to lender, every period: "I am alive and hold these leases".
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Renew {
    /// The leases that the borrower holds of this lender.
    #[schema(value_type = Vec<schema::Id>)]
    pub leases: Vec<LeaseId>,
    /// Those that have moved with their regions to the borrower, each with its generation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moved: Vec<MovedLease>,
    /// The time in milliseconds for which the borrower's I/O waits for this lender before it fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = "uint64", maximum = 18_446_744_073_709_551_615_u64)]
    pub io_timeout_ms: Option<u64>,
}

/// Returns whether a lease has never moved. Older agents know no other generation.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_first(generation: &u32) -> bool {
    *generation == 0
}

/// A lease that has moved with its region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MovedLease {
    /// The lease.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
    /// How often it has moved.
    #[schema(format = "uint32", maximum = 4_294_967_295_u64)]
    pub generation: u32,
}

/// Borrower to lender: I am about to move a region to `to`, which needs this lease. The lender
/// answers once it admits that host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Permit {
    /// The lease.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
    /// How often it has moved before.
    #[schema(format = "uint32", maximum = 4_294_967_295_u64)]
    pub generation: u32,
    /// The other host.
    #[schema(value_type = schema::Name)]
    pub to: HostName,
}

/// Lender to borrower, the answer to [`Renew`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Renewed {
    /// The renewed leases that the lender does not have. It lost them, or freed them because the
    /// borrower was silent for the whole grace.
    #[serde(default)]
    #[schema(value_type = Vec<schema::Id>)]
    pub lost: Vec<LeaseId>,
}

/// Borrower to lender, the answer to [`MemLenFin`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Leaving {
    /// The reason why the last attempt to leave the lease failed, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// The memory that a host can lend now. Borrowers choose by it which lender to ask first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Offer {
    /// The host that offers.
    #[schema(value_type = schema::Name)]
    pub host: HostName,
    /// The bytes that the host would grant to swap now. Zero while it borrows or is short of
    /// memory.
    #[schema(value_type = schema::Size)]
    pub spare: Bytes,
    /// The bytes that the host would grant to regions now. Absent if it is the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Size>)]
    pub for_regions: Option<Bytes>,
    /// The bytes that the host would grant now to second copies that go first. Absent if it is the
    /// same as for regions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<schema::Size>)]
    pub for_copies: Option<Bytes>,
    /// The bytes of which a VM that comes there can make use. Zero while an operator drains the
    /// host, and if its configuration accepts no VMs.
    #[schema(value_type = schema::Size)]
    pub room: Bytes,
    /// An id of the agent that answers, new at each start.
    #[serde(default)]
    pub agent: String,
    /// The address at which the agent calls the host that asks. If another agent answers at that
    /// address, two hosts share a name.
    #[serde(default)]
    pub you: String,
}

/// The data that a borrower needs besides the URI to use a lease over NVMe: the lender's answer to
/// `GET /v1/leases/LEASE/access`, only for the host that holds the lease. Not part of
/// [`MemBorAck`], because agents log and repeat that message.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Access {
    /// The host NQN that the lender admits, as a UUID made for this lease.
    pub host: String,
    /// The secrets for authentication. Absent if the lender does not authenticate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secrets: Option<AccessSecrets>,
}

/// Secrets of DH-HMAC-CHAP, each in the form `DHHC-1:…:`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AccessSecrets {
    /// The borrower's secret.
    pub borrower: String,
    /// The lender's secret.
    pub lender: String,
}

/// Host to host: take this VM, which I am about to move to you.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Arrive {
    /// The VM, its memory and this attempt, as the VMs' supervisors describe them.
    #[schema(value_type = Object)]
    pub arrival: serde_json::Value,
    /// Up to where the receiver may use its memory then. Absent if an operator chose the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below: Option<Threshold>,
}

/// The destination waits for the VM, and forgets it unless it arrives within half a minute.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Awaits {
    /// The address, for a connection with mutual TLS.
    #[schema(value_type = schema::Socket)]
    pub address: SocketAddr,
    /// Whether the destination has the VM's definition now.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub defined: bool,
}

impl fmt::Debug for Access {
    /// Leaves the secrets out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Access").field("host", &self.host).finish_non_exhaustive()
    }
}

impl fmt::Debug for AccessSecrets {
    /// Leaves the secrets out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessSecrets").finish_non_exhaustive()
    }
}

/// A host without a certificate asks a signer to admit it to the cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Join {
    /// The id of the token, 16 hexadecimal digits.
    pub token: String,
    /// The name of the host.
    #[schema(value_type = schema::Name)]
    pub host: HostName,
    /// The address at which the others shall reach its agent.
    #[schema(value_type = schema::Socket)]
    pub address: SocketAddr,
    /// The request for a certificate: PKCS#10 (RFC 2986) as DER, in Base64.
    pub request: String,
    /// The proof that the host has the token's secret: HMAC-SHA-256 of host, address and request.
    pub proof: String,
}

/// A host and the address of its agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemberAddress {
    /// The host.
    #[schema(value_type = schema::Name)]
    pub host: HostName,
    /// The address of its agent.
    #[schema(value_type = schema::Socket)]
    pub address: SocketAddr,
}

/// A host asks a signer for its next certificate. Its present one says which host it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NextCertificate {
    /// The request for a certificate for a new key: PKCS#10 (RFC 2986) as DER, in Base64.
    pub request: String,
}

/// The signer renews a certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SignedCertificate {
    /// The host's next certificate, as PEM.
    pub certificate: String,
}

/// The end of all certificates of a host that were issued until a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Revoked {
    /// The host.
    #[schema(value_type = schema::Name)]
    pub host: HostName,
    /// Seconds since 1970.
    #[schema(format = "uint64", maximum = 18_446_744_073_709_551_615_u64)]
    pub until: u64,
    /// Seconds since 1970. Then all these certificates have ended, and nobody renews them.
    #[schema(format = "uint64", maximum = 18_446_744_073_709_551_615_u64)]
    pub ends: u64,
    /// The authority's signature, as hexadecimal digits.
    pub signature: String,
}

/// A key that seals the gossip of the cluster's hosts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GossipKey {
    /// Counts the keys of a cluster: the highest holds.
    #[schema(format = "uint64", maximum = 18_446_744_073_709_551_615_u64)]
    pub number: u64,
    /// The key, 64 hexadecimal digits.
    pub key: String,
    /// The authority's signature, as hexadecimal digits.
    pub signature: String,
}

/// What a host knows of hosts that may not be in the cluster any more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Revocations {
    /// The ended certificates.
    pub revoked: Vec<Revoked>,
    /// The key of the gossip since then. Absent if it is still the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<GossipKey>,
}

/// The signer admits the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Joined {
    /// The host's certificate, as PEM.
    pub certificate: String,
    /// The authority's certificate, as PEM.
    pub authority: String,
    /// The key that seals the gossip of the cluster's hosts, 64 hexadecimal digits.
    pub key: String,
    /// The hosts of the cluster that the signer knows, itself among them.
    pub members: Vec<MemberAddress>,
    /// The last life of a host with this name: the new one must have a higher number.
    #[schema(format = "uint64", maximum = 18_446_744_073_709_551_615_u64)]
    pub life: u64,
    /// What the signer knows of hosts that may not be in the cluster any more. Absent at signers of
    /// older versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revocations: Option<Revocations>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_reason_is_told_to_the_sender() {
        let rej = |reason: &str| {
            serde_json::from_value::<MemBorRej>(serde_json::json!({
                "request": RequestId(1), "spare": 0, "reason": reason,
            }))
        };
        assert_eq!(rej("no_room").unwrap().reason, Reason::NoRoom);
        assert!(rej("mood").unwrap_err().to_string().contains("mood"));
    }

    #[test]
    fn a_malformed_request_id_is_told_to_the_sender() {
        let req = serde_json::json!({ "request": "1", "bytes": 0, "group": Group::default() });
        let error = serde_json::from_value::<MemBorReq>(req).unwrap_err().to_string();
        assert!(error.contains("request id"), "{error}");
    }
}
