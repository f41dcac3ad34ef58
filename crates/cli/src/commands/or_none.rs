//! A command-line value that `none` removes.

use std::str::FromStr;

/// A value, or the word 'none'.
#[derive(Clone, Debug)]
pub(super) struct OrNone<T>(pub(super) Option<T>);

impl<T: FromStr> FromStr for OrNone<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(if text == "none" { None } else { Some(text.parse()?) }))
    }
}
