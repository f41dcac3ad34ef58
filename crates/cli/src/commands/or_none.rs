//! A value that is to be, or not to be any more.

use std::str::FromStr;

/// A value that is said, or 'none'.
#[derive(Clone, Debug)]
pub(super) struct OrNone<T>(pub(super) Option<T>);

impl<T: FromStr> FromStr for OrNone<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(if text == "none" { None } else { Some(text.parse()?) }))
    }
}
