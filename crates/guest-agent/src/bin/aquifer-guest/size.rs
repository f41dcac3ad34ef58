//! Signed sizes, and times, in command-line arguments.

use std::str::FromStr;
use std::time::Duration;

use aquifer_guest_agent::{Client, Granted, RequestError};
use aquifer_page::{Bytes, ParseBytesError};

/// A change of the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    More(Bytes),
    Less(Bytes),
}

impl Change {
    /// Asks the agent for the change.
    pub(crate) fn ask(
        self,
        client: &Client,
        timeout: Duration,
        why: &str,
    ) -> Result<Granted, RequestError> {
        match self {
            Self::More(bytes) => client.request(bytes, timeout, why),
            Self::Less(bytes) => client.give_back(bytes, timeout, why),
        }
    }
}

impl FromStr for Change {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Self, ParseBytesError> {
        match text.strip_prefix('-') {
            Some(size) => size.parse().map(Self::Less),
            None => text.strip_prefix('+').unwrap_or(text).parse().map(Self::More),
        }
    }
}

/// Parses a time such as `500ms`, `10s` or `2m`.
pub(crate) fn wait(text: &str) -> Result<Duration, String> {
    let (number, unit) =
        text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let unit = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => {
            return Err(format!(
                "'{unit}' is not a unit of time: use ms, s, m or h, as in 500ms, 10s or 2m"
            ));
        }
    };
    let number: u64 = number.parse().map_err(|_| "write a time as 500ms, 10s or 2m".to_owned())?;
    Ok(Duration::from_millis(number.saturating_mul(unit)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_more_unless_it_has_a_minus() {
        for (text, change) in [
            ("+512M", Change::More(Bytes::mib(512))),
            ("1G", Change::More(Bytes::gib(1))),
            ("-64MiB", Change::Less(Bytes::mib(64))),
        ] {
            assert_eq!(text.parse(), Ok(change), "{text}");
        }
        assert!("--1G".parse::<Change>().is_err());
        assert!("+".parse::<Change>().is_err());
    }

    #[test]
    fn times_have_the_common_units() {
        assert_eq!(wait("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(wait("10"), Ok(Duration::from_secs(10)));
        assert_eq!(wait("2m"), Ok(Duration::from_secs(120)));
        assert!(wait("2 parsecs").is_err());
        assert!(wait("s").is_err());
    }
}
