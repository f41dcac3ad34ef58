use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Why a text cannot be a name or an id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Host and group names follow the rules of DNS labels, so that they fit certificates, paths and URLs.
    #[error(
        "'{0}' cannot be a {1} name: use 1 to 63 of a-z, A-Z, 0-9, '-', '.' and '_', starting with a letter or digit"
    )]
    Name(String, &'static str),
    /// Ids are 32 hexadecimal digits.
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
            /// The name as text.
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
            /// With the digits by which people know it.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($type))
            }
        }

        impl $type {
            /// A new random id.
            ///
            /// # Panics
            /// If the kernel has no randomness to give, which Linux only does before it has booted.
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
    /// The name of a host: what its certificate says and what its peers call it.
    HostName,
    "host"
);
name!(
    /// The tenant whose pages may be shared with each other and with no one else.
    Group,
    "group"
);
name!(
    /// The name of a region and of its file; that of a VM is its region's.
    RegionName,
    "region"
);
id!(
    /// A lender's promise of extents to one borrower.
    LeaseId,
    "lease"
);
id!(
    /// A borrower's linear address space over extents of one or more leases.
    VolumeId,
    "volume"
);
id!(
    /// One attempt to move a VM to another host.
    MigrationId,
    "migration"
);

id!(
    /// Who owns the pages in a lease: a volume or a region, for as long as that lives.
    OwnerId,
    "owner"
);
id!(
    /// A process that works for an owner. Random, so that one of the past is never taken for another.
    ClientId,
    "client"
);
id!(
    /// The life of the pages behind an export. It is new whenever they are gone, so a lender that forgot is known by it.
    Incarnation,
    "incarnation"
);

impl Default for Group {
    /// The group of leases that name none: `default`.
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
