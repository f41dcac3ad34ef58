//! The five messages of \[Ge23\] ("Signaling of Events", Figs. 4 and 5), and the other messages
//! between hosts.
//!
//! Each request is a `POST` to the path of its name, except for [`Offer`] and [`Access`], which
//! answer a `GET`. An answer of 200 means that the receiver has accepted the message and will not
//! forget it. After any other answer the sender must send the message again. The receiver accepts
//! duplicates.

use std::fmt;
use std::net::SocketAddr;

use aquifer_page::{Bytes, Group, HostName, LeaseId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::schema;

/// Borrower to lender: "lend me `bytes`". Answered by [`MemBorAck`] or [`MemBorRej`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemBorReq {
    /// Chosen by the borrower, 32 hexadecimal digits; the same request sent again yields the same lease.
    #[schema(value_type = schema::Id)]
    pub request: String,
    /// M_req, in whole extents of 64 MiB.
    #[schema(value_type = schema::Size)]
    pub bytes: Bytes,
    /// The tenant to whom the lender accounts the lease.
    #[schema(value_type = schema::Name)]
    pub group: Group,
}

/// Lender to borrower: the request is granted, and this is where its memory is reached. Sent again to a borrower that
/// is silent it asks "do you still hold this lease?".
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemBorAck {
    /// The request that this answers.
    #[schema(value_type = schema::Id)]
    pub request: String,
    /// The lease, which is also the name of its NBD export, and in the form of a UUID that of its NVMe subsystem.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
    /// What is promised.
    #[schema(value_type = schema::Size)]
    pub bytes: Bytes,
    /// By what its pages are reached, one URI a protocol: `nbds://HOST:PORT/LEASE`, `nvme+tcp://HOST:PORT/NQN`,
    /// `nvme+rdma://HOST:PORT/NQN`. For the last two, [`Access`] has what else is needed.
    pub uris: Vec<String>,
}

/// Lender to borrower: the request is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemBorRej {
    /// The request that this answers.
    #[schema(value_type = schema::Id)]
    pub request: String,
    /// What the lender could spare at that moment.
    #[schema(value_type = schema::Size)]
    pub spare: Bytes,
    /// Why: `no_room`, `overloaded`, `borrowing`, `asking`, `recalling`, `starting`, `settled`, `invalid` or `failed`.
    #[schema(value_type = schema::Reason)]
    pub reason: String,
}

/// Borrower to lender: the lease is no longer used; its memory may be freed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemBorFin {
    /// The lease.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
}

/// Lender to borrower: move your pages elsewhere and give the lease back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemLenFin {
    /// The lease.
    #[schema(value_type = schema::Id)]
    pub lease: LeaseId,
}

/// Borrower to lender, every period: "I am alive and hold these leases".
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Renew {
    /// The leases that the borrower holds of this lender.
    #[schema(value_type = Vec<schema::Id>)]
    pub leases: Vec<LeaseId>,
    /// How long I/O of the borrower waits for this lender before it fails, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(format = "uint64", maximum = 18_446_744_073_709_551_615_u64)]
    pub io_timeout_ms: Option<u64>,
}

/// Lender to borrower, the answer to [`Renew`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Renewed {
    /// Of the renewed leases those that the lender does not have: it lost them, or gave them up when the borrower was
    /// silent for its whole grace.
    #[serde(default)]
    #[schema(value_type = Vec<schema::Id>)]
    pub lost: Vec<LeaseId>,
}

/// Borrower to lender, the answer to [`MemLenFin`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Leaving {
    /// Why the last try to leave the lease failed, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// What a host could lend now: the answer by which borrowers choose whom to ask first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Offer {
    /// The host that offers.
    #[schema(value_type = schema::Name)]
    pub host: HostName,
    /// What it would grant now; zero while it borrows or is short itself.
    #[schema(value_type = schema::Size)]
    pub spare: Bytes,
    /// The agent that answers: another one after each start.
    #[serde(default)]
    pub agent: String,
    /// Where it calls the host that asks. A host that meets another agent there shares its name with another host.
    #[serde(default)]
    pub you: String,
}

/// What a borrower needs besides the URI to use a lease over NVMe: the lender's answer to `GET /v1/leases/LEASE/access`, for the
/// host alone that has the lease. Not part of [`MemBorAck`], which is logged and sent again.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Access {
    /// The NQN by which the lender lets the borrower in, in the form of a UUID, made for this lease.
    pub host: String,
    /// What each side must prove that it knows; nothing, if the lender asks for no proof.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secrets: Option<AccessSecrets>,
}

/// Secrets of DH-HMAC-CHAP, each in the form `DHHC-1:…:`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AccessSecrets {
    /// The borrower's.
    pub borrower: String,
    /// The lender's.
    pub lender: String,
}

/// Host to host: take this VM, which I am about to move to you.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Arrive {
    /// The VM, its memory and this attempt, as the keepers of VMs know them.
    #[schema(value_type = Object)]
    pub arrival: serde_json::Value,
}

/// The VM is waited for: it is there within half a minute, or forgotten.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Awaits {
    /// Where, for a connection with mutual TLS.
    #[schema(value_type = schema::Socket)]
    pub address: SocketAddr,
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
