//! NVMe Qualified Names.

use std::fmt;
use std::str::FromStr;

use aquifer_page::LeaseId;
use serde::{Deserialize, Serialize};

use super::NQN_FIELD;

/// The name of every discovery subsystem (Base, section 4.5 "NVMe Qualified Names").
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// The prefix of names that need no domain: a UUID follows.
const UUID_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

/// An NVMe Qualified Name of a host or a subsystem; at most 223 bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Nqn(String);

/// The reason why a text is not an NQN.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not an NQN: {1}; write nqn.YYYY-MM.DOMAIN:NAME or {UUID_PREFIX}UUID, as in \
     /etc/nvme/hostnqn"
)]
pub struct NqnError(String, &'static str);

impl Nqn {
    /// Returns the name of a lease's subsystem: the lease's id in the form of a UUID.
    pub fn of_lease(lease: LeaseId) -> Self {
        let id = lease.to_string();
        Self(format!(
            "{UUID_PREFIX}{}-{}-{}-{}-{}",
            &id[..8],
            &id[8..12],
            &id[12..16],
            &id[16..20],
            &id[20..]
        ))
    }

    /// Returns the name of every discovery subsystem.
    pub fn discovery() -> Self {
        Self(DISCOVERY_NQN.to_owned())
    }

    /// Returns whether this is the name of every discovery subsystem.
    pub fn is_discovery(&self) -> bool {
        self.0 == DISCOVERY_NQN
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns a stable identifier for the host of this name: the UUID in the name, else a hash of
    /// the name.
    pub fn host_id(&self) -> [u8; 16] {
        let uuid = self.0.strip_prefix(UUID_PREFIX).map(|uuid| uuid.replace('-', ""));
        let number = uuid.filter(|digits| digits.len() == 32);
        match number.and_then(|digits| u128::from_str_radix(&digits, 16).ok()) {
            Some(number) => number.to_be_bytes(),
            None => {
                let digest = ring::digest::digest(&ring::digest::SHA256, self.0.as_bytes());
                std::array::from_fn(|at| digest.as_ref()[at])
            }
        }
    }

    /// Returns the name as a field of a structure, padded with zero bytes.
    pub fn to_field(&self) -> [u8; NQN_FIELD] {
        let mut field = [0; NQN_FIELD];
        // Names have at most 223 bytes: `try_from` has checked that.
        field[..self.0.len()].copy_from_slice(self.0.as_bytes());
        field
    }

    /// Reads a field that holds a name.
    ///
    /// # Errors
    /// If the field is not UTF-8, not ended by a zero byte, or not an NQN.
    pub fn from_field(field: &[u8; NQN_FIELD]) -> Result<Self, NqnError> {
        let text = field.split(|&byte| byte == 0).next().unwrap_or_default();
        String::from_utf8_lossy(text).into_owned().try_into()
    }
}

impl TryFrom<String> for Nqn {
    type Error = NqnError;

    fn try_from(text: String) -> Result<Self, NqnError> {
        let error = |why| Err(NqnError(text.clone(), why));
        if text.len() > 223 {
            return error("it has more than 223 bytes");
        }
        // "nqn." year "-" month "." and a name; the rest is up to the naming authority.
        let mut date = text.bytes().skip(4).take(8).zip(*b"dddd-dd.");
        let well_formed = |(byte, form): (u8, u8)| {
            if form == b'd' { byte.is_ascii_digit() } else { byte == form }
        };
        if !text.starts_with("nqn.") || text.len() < 13 || !date.all(well_formed) {
            return error("it does not start with nqn.YYYY-MM. and a name");
        }
        if text.chars().any(|c| c.is_control() || c.is_whitespace() || c == '\u{fffd}') {
            return error("it contains a space or a control character");
        }
        Ok(Self(text))
    }
}

impl FromStr for Nqn {
    type Err = NqnError;

    fn from_str(text: &str) -> Result<Self, NqnError> {
        text.to_owned().try_into()
    }
}

impl From<Nqn> for String {
    fn from(nqn: Nqn) -> Self {
        nqn.0
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_being_put_into_a_field_and_taken_out() {
        let nqn = Nqn::of_lease(LeaseId(0x0123_4567_89ab_cdef_0011_2233_4455_6677));
        assert_eq!(
            nqn.as_str(),
            "nqn.2014-08.org.nvmexpress:uuid:01234567-89ab-cdef-0011-223344556677"
        );
        assert_eq!(Nqn::from_field(&nqn.to_field()), Ok(nqn.clone()));
        assert_eq!(nqn.host_id(), 0x0123_4567_89ab_cdef_0011_2233_4455_6677_u128.to_be_bytes());
        assert_ne!(Nqn::discovery().host_id(), [0; 16]);
        assert_eq!(nqn.as_str().parse(), Ok(nqn));
        assert!(DISCOVERY_NQN.parse::<Nqn>().is_ok_and(|nqn| nqn.is_discovery()));
    }

    #[test]
    fn a_malformed_name_is_refused() {
        let long = format!("nqn.2014-08.org:{}", "x".repeat(220));
        for text in [
            "",
            "nqn",
            "nqn.2014-08.",
            "iqn.2014-08.org.a:b",
            "nqn.20x4-08.org",
            "nqn.2014-08.a b",
            &long,
        ] {
            assert!(text.parse::<Nqn>().is_err(), "{text}");
        }
        let mut field = Nqn::discovery().to_field();
        field[5] = 0xff;
        assert!(Nqn::from_field(&field).is_err());
        assert!(Nqn::from_field(&[b'n'; NQN_FIELD]).is_err());
    }
}
