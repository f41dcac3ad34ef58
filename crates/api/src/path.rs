//! The paths of the API. Those of [`crate::message`] are for peers, and the rest for the unix
//! socket. Both serve [`OPENAPI`].

use aquifer_control::node::Threshold;
use aquifer_page::{Group, LeaseId};

/// `POST` [`crate::message::MemBorReq`]: the borrower asks for memory.
pub const MEM_BOR_REQ: &str = "/v1/mem_bor_req";
/// `POST` [`crate::message::MemBorAck`]: the lender grants a request.
pub const MEM_BOR_ACK: &str = "/v1/mem_bor_ack";
/// `POST` [`crate::message::MemBorRej`]: the lender refuses a request.
pub const MEM_BOR_REJ: &str = "/v1/mem_bor_rej";
/// `POST` [`crate::message::MemBorFin`]: the borrower gives a lease back.
pub const MEM_BOR_FIN: &str = "/v1/mem_bor_fin";
/// `POST` [`crate::message::MemLenFin`]: the lender asks a lease back.
pub const MEM_LEN_FIN: &str = "/v1/mem_len_fin";
/// `POST` [`crate::message::Renew`]: the borrower names the leases that it still holds.
pub const RENEW: &str = "/v1/renew";
/// `POST` [`crate::message::Permit`]: the borrower names a host to which it may move a region.
pub const PERMIT: &str = "/v1/permit";
/// `GET` [`crate::message::Offer`]: the memory that a host can lend now.
pub const OFFER: &str = "/v1/offer";
/// `GET` [`crate::cluster::Summary`]: what a host has, and lends to whom.
pub const SUMMARY: &str = "/v1/summary";
/// `GET` [`crate::message::Access`]: the access data of a lease over NVMe, for its borrower. See
/// [`access`].
pub const ACCESS: &str = "/v1/leases/{lease}/access";
/// `POST` [`crate::message::Arrive`]: the source of a migration announces a VM.
pub const ARRIVE: &str = "/v1/vms/arrive";
/// `POST` [`crate::message::Join`], without a certificate: a host wants to join the cluster.
pub const JOIN: &str = "/v1/join";
/// [`JOIN`] for a host that renews its certificate by itself. A signer gives others, which run an
/// older version, one of ten years. Older signers ignore the query.
pub const JOIN_AND_RENEW: &str = "/v1/join?renews=true";
/// `POST` [`crate::message::NextCertificate`]: a host of the cluster asks a signer for its next
/// certificate. The present one may have ended.
pub const CERTIFICATE: &str = "/v1/certificate";
/// `GET` [`crate::message::Revocations`]: what a host knows of revoked hosts; `POST` tells it.
pub const REVOCATIONS: &str = "/v1/revocations";
/// `POST` [`crate::order::Leave`]: a host of the cluster tells a signer that it leaves.
pub const LEFT: &str = "/v1/left";
/// `GET` [`crate::agreement::Known`]: what a host knows of the cluster's agreements.
pub const AGREEMENTS: &str = "/v1/agreements";
/// `GET` [`crate::agreement::GivenAgreement`]: a group's agreement with its key, for a host that
/// may have it. See [`agreement`].
pub const AGREEMENT: &str = "/v1/agreements/{group}";
/// `GET` the OpenAPI document.
pub const OPENAPI: &str = "/v1/openapi.json";
/// `GET` [`crate::status::Status`].
pub const STATUS: &str = "/v1/status";
/// `GET` a list of [`crate::cluster::ClusterHost`]: all hosts, each asked now.
pub const CLUSTER: &str = "/v1/cluster";
/// `GET` a list of [`crate::group::Group`].
pub const GROUPS: &str = "/v1/groups";
/// `GET` [`crate::agreement::Known`], with the conflicts.
pub const KNOWN_GROUPS: &str = "/v1/groups/known";
/// `POST` [`crate::agreement::Find`]; answers [`crate::agreement::Found`].
pub const FIND_GROUP: &str = "/v1/groups/find";
/// `POST` [`crate::order::Borrow`].
pub const BORROW: &str = "/v1/borrow";
/// `POST` [`crate::order::Return`].
pub const RETURN: &str = "/v1/return";
/// `POST` [`crate::order::RotateKeys`].
pub const ROTATE_KEYS: &str = "/v1/keys/rotate";
/// `POST` [`crate::order::Drain`]; `GET` the progress. Both answer [`crate::order::Draining`].
pub const DRAIN: &str = "/v1/drain";
/// `POST` [`crate::order::Claim`].
pub const CLAIM: &str = "/v1/claim";
/// `POST` [`crate::order::Forget`]; answers [`crate::order::Forgotten`].
pub const FORGET: &str = "/v1/forget";
/// `POST` [`crate::order::Leave`]; answers [`crate::order::Departed`].
pub const LEAVE: &str = "/v1/leave";
/// `POST` [`crate::order::BorrowFor`]; answers [`crate::order::Provided`].
pub const REGION_BORROW: &str = "/v1/regions/borrow";
/// `POST` [`crate::order::Settle`].
pub const REGION_SETTLE: &str = "/v1/regions/settle";
/// `POST` [`crate::order::Migrate`].
pub const MIGRATE: &str = "/v1/vms/migrate";

/// Returns [`OFFER`] with the threshold that limits [`crate::message::Offer::room`]. Older agents
/// ignore the threshold, and answer for [`Threshold::Upper`].
pub fn offer(below: Threshold) -> String {
    match below {
        Threshold::Upper => OFFER.to_owned(),
        Threshold::Lower => format!("{OFFER}?below=lower"),
    }
}

/// Returns [`AGREEMENT`] of one group.
pub fn agreement(group: &Group) -> String {
    AGREEMENT.replace("{group}", group.as_str())
}

/// Returns [`ACCESS`] of one lease.
pub fn access(lease: LeaseId) -> String {
    ACCESS.replace("{lease}", &lease.to_string())
}
