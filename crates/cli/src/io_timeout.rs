//! `--io-timeout`: the timeout of I/O to a lender.

use std::time::Duration;

use aquifer_volume::VolumeConfig;

/// The timeout of I/O to a lender; `None` for no timeout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoTimeout(pub Option<Duration>);

impl IoTimeout {
    /// Returns the timeout of a volume, which waits for at most a day.
    pub fn of_volume(self) -> Duration {
        self.0.unwrap_or(MOST)
    }
}

impl Default for IoTimeout {
    fn default() -> Self {
        Self(Some(VolumeConfig::DEFAULT_IO_TIMEOUT))
    }
}

/// No host that comes back is away for longer.
const MOST: Duration = Duration::from_secs(86_400);

/// Parses whole seconds (the kernel takes no fractions), or `forever`.
///
/// # Errors
/// With a sentence that names the valid forms.
pub fn parse(text: &str) -> Result<IoTimeout, String> {
    if text == "forever" {
        return Ok(IoTimeout(None));
    }
    let time = humantime::parse_duration(text)
        .map_err(|error| format!("{error}; write 8s, 2m or forever"))?;
    let is_whole = time.subsec_nanos() == 0 && (1..=MOST.as_secs()).contains(&time.as_secs());
    if is_whole {
        Ok(IoTimeout(Some(time)))
    } else {
        Err("write whole seconds, from 1s to 1day".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_io_timeout_is_whole_seconds_or_without_end() {
        assert_eq!(parse("2m"), Ok(IoTimeout(Some(Duration::from_secs(120)))));
        assert_eq!(parse("8s"), Ok(IoTimeout::default()));
        assert_eq!(parse("forever"), Ok(IoTimeout(None)));
        for text in ["0s", "1500ms", "long", "2days"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
