//! The five messages between the controllers of two hosts.

use std::fmt;

use aquifer_page::{Bytes, Group, LeaseId, NameError};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::Owner;

/// A host's role towards the others (StateFlag of \[Ge23\], Fig. 3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The host neither borrows nor lends.
    #[default]
    Neutral,
    /// The host has at least one volume in other hosts' memory.
    Borrower,
    /// The host has given at least one lease.
    Lender,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Neutral => "neutral",
            Self::Borrower => "borrower",
            Self::Lender => "lender",
        })
    }
}

/// The id of one request of a borrower to one lender; a repeated request has the same id. Written
/// as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RequestId(pub u128);

impl fmt::Debug for RequestId {
    /// Writes the same digits as `Display`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestId({self})")
    }
}

impl TryFrom<String> for RequestId {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        let well_formed = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        match u128::from_str_radix(&text, 16) {
            Ok(number) if well_formed => Ok(Self(number)),
            _ => Err(NameError::Id(text, "request")),
        }
    }
}

impl From<RequestId> for String {
    fn from(id: RequestId) -> Self {
        id.to_string()
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The reason why a lender rejects a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The lender borrows itself.
    Borrowing,
    /// The lender is asking others for memory.
    Asking,
    /// The lender's memory use is above T_upper.
    Overloaded,
    /// The lender is recalling leases.
    Recalling,
    /// The lender is draining: its operator wants all leases back.
    Draining,
    /// The request is larger than the lender's spare memory (Algorithm 2 line 2).
    NoRoom,
    /// The lender has not read its own memory yet.
    Starting,
    /// The lease of this request has come and gone: the request is an old one.
    Settled,
    /// The requested size is zero or not in whole extents.
    Invalid,
    /// The lender could not set the lease up; its log has the error.
    Failed,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Borrowing => "it borrows itself",
            Self::Asking => "it is asking for memory itself",
            Self::Overloaded => "it is overloaded",
            Self::Recalling => "it is recalling leases",
            Self::Draining => "it is draining",
            Self::NoRoom => "it cannot spare that much",
            Self::Starting => "it has only just started",
            Self::Settled => "it has answered this request before",
            Self::Invalid => "the size is not in whole extents",
            Self::Failed => "it could not set up the lease",
        })
    }
}

/// The five messages of \[Ge23\] ("API Listener", Figs. 4 and 5). Each may be repeated without
/// harm.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub enum Message {
    /// Borrower to lender: lend me memory.
    MemBorReq {
        /// The request's id, which the answer repeats.
        request: RequestId,
        /// M_req in whole extents.
        bytes: Bytes,
        /// The owner of the lease's pages.
        #[serde(default, rename = "region", skip_serializing_if = "Owner::is_swap")]
        owner: Owner,
        /// The tenant that the lease is accounted to.
        group: Group,
        /// Whether the lease is for second copies that the lender takes back before anything else.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        goes_first: bool,
    },
    /// Lender to borrower: here is the lease. When repeated, it asks: do you still hold this lease?
    MemBorAck {
        /// The id of the request.
        request: RequestId,
        /// The lease set up for the request.
        lease: LeaseId,
        /// The lease's capacity.
        bytes: Bytes,
        /// The URIs that reach its pages, one for each protocol (the paper's NQN).
        uris: Vec<String>,
        /// How often the lease has moved with its region to another host.
        #[serde(default, skip_serializing_if = "is_first")]
        generation: u32,
    },
    /// Lender to borrower: no.
    MemBorRej {
        /// The id of the request.
        request: RequestId,
        /// The bytes that the lender could spare instead.
        spare: Bytes,
        /// The reason.
        reason: Reason,
    },
    /// Borrower to lender: I no longer use this lease, free it.
    MemBorFin {
        /// The lease.
        lease: LeaseId,
        /// The generation that the borrower held, or that the lender asked about.
        #[serde(default, skip_serializing_if = "is_first")]
        generation: u32,
    },
    /// Lender to borrower: I need this lease back, move your pages elsewhere.
    MemLenFin {
        /// The lease.
        lease: LeaseId,
        /// The lease's generation.
        #[serde(default, skip_serializing_if = "is_first")]
        generation: u32,
    },
}

/// Returns whether the lease has never moved. Older agents know no other generation.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_first(generation: &u32) -> bool {
    *generation == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_written_under_the_names_of_the_paper() {
        let message = Message::MemBorReq {
            request: RequestId(7),
            bytes: Bytes::mib(64),
            owner: Owner::Swap,
            group: Group::default(),
            goes_first: false,
        };
        let text = serde_json::to_string(&message).unwrap();
        assert_eq!(
            text,
            concat!(
                r#"{"message":"mem_bor_req","request":"00000000000000000000000000000007","#,
                r#""bytes":67108864,"group":"default"}"#
            )
        );
        assert_eq!(serde_json::from_str::<Message>(&text).unwrap(), message, "as of old agents");
    }

    #[test]
    fn a_malformed_request_id_is_refused() {
        for text in ["", "7", "+0000000000000000000000000000007", &"g".repeat(32)] {
            assert!(RequestId::try_from(text.to_owned()).is_err(), "{text}");
        }
    }
}
