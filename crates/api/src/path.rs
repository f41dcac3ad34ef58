//! The paths of the API. Those of [`crate::message`] are for peers, the rest for the unix socket;
//! [`OPENAPI`] answers both.

use aquifer_page::LeaseId;

/// `POST` [`crate::message::MemBorReq`]: a borrower asks for memory.
pub const MEM_BOR_REQ: &str = "/v1/mem_bor_req";
/// `POST` [`crate::message::MemBorAck`]: a lender grants a request.
pub const MEM_BOR_ACK: &str = "/v1/mem_bor_ack";
/// `POST` [`crate::message::MemBorRej`]: a lender refuses a request.
pub const MEM_BOR_REJ: &str = "/v1/mem_bor_rej";
/// `POST` [`crate::message::MemBorFin`]: a borrower gives a lease back.
pub const MEM_BOR_FIN: &str = "/v1/mem_bor_fin";
/// `POST` [`crate::message::MemLenFin`]: a lender wants a lease's memory back.
pub const MEM_LEN_FIN: &str = "/v1/mem_len_fin";
/// `POST` [`crate::message::Renew`]: a borrower still needs these leases.
pub const RENEW: &str = "/v1/renew";
/// `GET` [`crate::message::Offer`]: what a host could lend now.
pub const OFFER: &str = "/v1/offer";
/// `GET` [`crate::message::Access`]: how the host that has a lease gets at it over NVMe. See [`access`].
pub const ACCESS: &str = "/v1/leases/{lease}/access";
/// `POST` [`crate::message::Arrive`]: a host is about to move a VM to this one.
pub const ARRIVE: &str = "/v1/vms/arrive";
/// `GET` the OpenAPI document.
pub const OPENAPI: &str = "/v1/openapi.json";
/// `GET` [`crate::status::Status`].
pub const STATUS: &str = "/v1/status";
/// `GET` a list of [`crate::group::Group`].
pub const GROUPS: &str = "/v1/groups";
/// `POST` [`crate::order::Borrow`].
pub const BORROW: &str = "/v1/borrow";
/// `POST` [`crate::order::Return`].
pub const RETURN: &str = "/v1/return";
/// `POST` [`crate::order::Drain`]; `GET` how far it is. Both answer [`crate::order::Draining`].
pub const DRAIN: &str = "/v1/drain";
/// `POST` [`crate::order::Migrate`].
pub const MIGRATE: &str = "/v1/vms/migrate";

/// [`ACCESS`] of one lease.
pub fn access(lease: LeaseId) -> String {
    ACCESS.replace("{lease}", &lease.to_string())
}
