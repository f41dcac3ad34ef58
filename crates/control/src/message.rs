use std::fmt;

use aquifer_page::{Bytes, Group, LeaseId, NameError};
use serde::{Deserialize, Serialize};

/// What a host is to the others (the paper's StateFlag, Fig. 3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Neither borrows nor lends.
    #[default]
    Neutral,
    /// Has at least one volume in other hosts' memory.
    Borrower,
    /// Has given at least one lease.
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

/// One request of a borrower to one lender: repeated, it is the same request. Written as 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RequestId(pub u128);

impl fmt::Debug for RequestId {
    /// With the digits by which people know it.
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

/// Why a lender says no.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// It borrows itself.
    Borrowing,
    /// It is asking others for memory itself.
    Asking,
    /// Its own memory is above T_upper.
    Overloaded,
    /// It is taking back what it lent.
    Recalling,
    /// It lends nothing now: its operator wants all that it has lent back.
    Draining,
    /// The request is larger than what it can spare (Algorithm 2 line 2).
    NoRoom,
    /// It has not read its own memory yet.
    Starting,
    /// The lease of this request has come and gone: the request is an old one.
    Settled,
    /// The size asked for is zero or not in whole extents.
    Invalid,
    /// It could not set the lease up; its own log says why.
    Failed,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Borrowing => "it borrows itself",
            Self::Asking => "it is asking for memory itself",
            Self::Overloaded => "it is overloaded",
            Self::Recalling => "it is taking back what it lent",
            Self::Draining => "it lends nothing now",
            Self::NoRoom => "it cannot spare that much",
            Self::Starting => "it is only starting",
            Self::Settled => "the request is an old one",
            Self::Invalid => "the size is not in whole extents",
            Self::Failed => "it could not set up the lease",
        })
    }
}

/// The five messages of the paper ("API Listener", Figs. 4 and 5). Each may be repeated without harm.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub enum Message {
    /// Borrower to lender: lend me this much.
    MemBorReq {
        /// Names the request; the answer carries it too.
        request: RequestId,
        /// M_req in whole extents.
        bytes: Bytes,
        /// The tenant that the lease is accounted to.
        group: Group,
    },
    /// Lender to borrower: here it is. Repeated, it asks: do you still hold this lease?
    MemBorAck {
        /// The request that is answered.
        request: RequestId,
        /// The lease that was set up for it.
        lease: LeaseId,
        /// Its capacity.
        bytes: Bytes,
        /// By what its pages are reached, one URI a protocol (the paper's NQN).
        uris: Vec<String>,
    },
    /// Lender to borrower: no.
    MemBorRej {
        /// The request that is answered.
        request: RequestId,
        /// What the lender could spare instead.
        spare: Bytes,
        /// Why not.
        reason: Reason,
    },
    /// Borrower to lender: I no longer use this lease, free it.
    MemBorFin {
        /// The lease.
        lease: LeaseId,
    },
    /// Lender to borrower: I need this lease back, move your pages elsewhere.
    MemLenFin {
        /// The lease.
        lease: LeaseId,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_written_under_the_names_of_the_paper() {
        let message = Message::MemBorReq {
            request: RequestId(7),
            bytes: Bytes::mib(64),
            group: Group::default(),
        };
        let text = serde_json::to_string(&message).unwrap();
        assert_eq!(
            text,
            r#"{"message":"mem_bor_req","request":"00000000000000000000000000000007","bytes":67108864,"group":"default"}"#
        );
        assert_eq!(serde_json::from_str::<Message>(&text).unwrap(), message);
    }

    #[test]
    fn a_malformed_request_id_is_refused() {
        for text in ["", "7", "+0000000000000000000000000000007", &"g".repeat(32)] {
            assert!(RequestId::try_from(text.to_owned()).is_err(), "{text}");
        }
    }
}
