//! In-band authentication by DH-HMAC-CHAP, as far as both ends need it: secrets, hashes, groups,
//! responses.

mod group;
mod hash;
mod response;
mod secret;

pub use group::{Exchange, Group};
pub use hash::Hash;
pub use response::{Response, Side};
pub use secret::{Secret, SecretError};

use std::str::FromStr;

/// The secrets by which a host and a controller prove their names to each other.
#[derive(Clone, Debug)]
pub struct Secrets {
    /// The host's secret.
    pub host: Secret,
    /// The controller's secret; with it the host demands a proof of the controller.
    pub controller: Option<Secret>,
}

impl FromStr for Secrets {
    type Err = SecretError;

    /// Reads a file of secrets: the host's on the first line, the controller's on an optional
    /// second one.
    fn from_str(text: &str) -> Result<Self, SecretError> {
        let mut secrets = text.lines().filter(|line| !line.trim().is_empty()).map(str::parse);
        let host = secrets.next().ok_or(SecretError("the file is empty"))??;
        Ok(Self { host, controller: secrets.next().transpose()? })
    }
}
