//! In-band authentication by DH-HMAC-CHAP, what both ends need: secrets, hashes, groups, responses.

mod group;
mod hash;
mod response;
mod secret;

pub use group::{Exchange, Group};
pub use hash::Hash;
pub use response::{Response, Side};
pub use secret::{Secret, SecretError};

/// What a host and a controller must know of each other.
#[derive(Clone, Debug)]
pub struct Secrets {
    /// The host's, by which it proves who it is.
    pub host: Secret,
    /// The controller's, by which it proves who it is if the host asks for that.
    pub controller: Option<Secret>,
}
