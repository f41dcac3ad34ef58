//! In-band authentication by DH-HMAC-CHAP, what both ends need: secrets, hashes, groups, responses.

mod group;
mod hash;
mod response;
mod secret;

pub use group::{Exchange, Group};
pub use hash::Hash;
pub use response::{Response, Side};
pub use secret::{Secret, SecretError};

use std::str::FromStr;

/// What a host and a controller must know of each other.
#[derive(Clone, Debug)]
pub struct Secrets {
    /// The host's, by which it proves who it is.
    pub host: Secret,
    /// The controller's, by which it proves who it is if the host asks for that.
    pub controller: Option<Secret>,
}

impl FromStr for Secrets {
    type Err = SecretError;

    /// Reads the contents of a file of secrets: the host's and, in a second line, if there is one, the controller's.
    fn from_str(text: &str) -> Result<Self, SecretError> {
        let mut secrets = text.lines().filter(|line| !line.trim().is_empty()).map(str::parse);
        let host = secrets.next().ok_or(SecretError("the file is empty"))??;
        Ok(Self { host, controller: secrets.next().transpose()? })
    }
}
