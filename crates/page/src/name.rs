//! Names of hosts, groups and regions, and random ids of 128 bits.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The reason why a text is not a name or an id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The text is not a name. The rules resemble those of DNS labels, so that names fit
    /// certificates, paths and URLs.
    #[error(
        "'{0}' cannot be a {1} name: use 1 to 63 of a-z, A-Z, 0-9, '-', '.' and '_', starting \
         with a letter or digit"
    )]
    Name(String, &'static str),
    /// The text is not an id: an id has 32 hexadecimal digits.
    #[error("'{0}' is not a {1} id: it must be 32 hexadecimal digits")]
    Id(String, &'static str),
}

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(String);

        impl $type {
            /// Returns the name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $type {
            type Error = NameError;

            fn try_from(text: String) -> Result<Self, NameError> {
                let allowed = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'.' | b'_');
                let good = (1..=63).contains(&text.len())
                    && text.bytes().all(allowed)
                    && text.as_bytes()[0].is_ascii_alphanumeric();
                if good { Ok(Self(text)) } else { Err(NameError::Name(text, $what)) }
            }
        }

        impl FromStr for $type {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                text.to_owned().try_into()
            }
        }

        impl From<$type> for String {
            fn from(name: $type) -> String {
                name.0
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }
    };
}

macro_rules! id {
    ($(#[$doc:meta])* $type:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(pub u128);

        impl fmt::Debug for $type {
            /// Writes the type and the 32 hexadecimal digits.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($type))
            }
        }

        impl $type {
            /// Returns a new random id.
            ///
            /// # Panics
            /// If the kernel gives no random bytes.
            pub fn random() -> Self {
                let mut bytes = [0; 16];
                getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
                Self(u128::from_le_bytes(bytes))
            }
        }

        impl FromStr for $type {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                let error = || NameError::Id(text.to_owned(), $what);
                if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
                    return Err(error());
                }
                u128::from_str_radix(text, 16).map(Self).map_err(|_| error())
            }
        }

        impl TryFrom<String> for $type {
            type Error = NameError;

            fn try_from(text: String) -> Result<Self, NameError> {
                text.parse()
            }
        }

        impl From<$type> for String {
            fn from(id: $type) -> String {
                id.to_string()
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:032x}", self.0)
            }
        }
    };
}

name!(
    /// The name of a host, in its certificate and for its peers.
    HostName,
    "host"
);
name!(
    /// The name of a zone: hosts of one zone may fail together.
    Zone,
    "zone"
);
name!(
    /// The name of a tenant. Pages are shared within a group, never between groups.
    Group,
    "group"
);
name!(
    /// The name of a region and of its file. A VM has the name of its region.
    RegionName,
    "region"
);
id!(
    /// The id of a lease: a lender's promise of extents to one borrower.
    LeaseId,
    "lease"
);
id!(
    /// The id of a volume: a borrower's linear address space over extents of one or more leases.
    VolumeId,
    "volume"
);
id!(
    /// The id of one attempt to move a VM to another host.
    MigrationId,
    "migration"
);

id!(
    /// The id of the owner of a lease's pages: a volume or a region, for its lifetime.
    OwnerId,
    "owner"
);
id!(
    /// The id of a process that works for an owner. It is random, so no later process has the same.
    ClientId,
    "client"
);
id!(
    /// The id of one life of the pages behind an export. It is new once the pages are gone, so a
    /// borrower recognizes a lender that lost them.
    Incarnation,
    "incarnation"
);

impl Default for Group {
    /// Returns `default`: the group of leases that name none.
    fn default() -> Self {
        Self("default".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_survives_being_written_and_read() {
        let id = LeaseId::random();
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_ne!(LeaseId::random(), id);
    }

    #[test]
    fn names_that_could_leave_a_path_or_a_url_are_refused() {
        for text in ["", ".", "..", "a/b", "-a", "a b", "ü", &"x".repeat(64)] {
            assert!(text.parse::<HostName>().is_err(), "{text}");
        }
        for text in ["a", "host-1", "db.eu_1", &"x".repeat(63)] {
            assert!(text.parse::<HostName>().is_ok(), "{text}");
        }
    }

    #[test]
    fn ids_of_the_wrong_length_or_alphabet_are_refused() {
        for text in ["", "12", "+0000000000000000000000000000001", &"g".repeat(32)] {
            assert!(text.parse::<LeaseId>().is_err(), "{text}");
        }
    }
}
