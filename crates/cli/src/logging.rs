//! The log on standard error of the agent and of other processes, as `AQUIFER_LOG` says.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::failure::{Failure, Result};

const VARIABLE: &str = "AQUIFER_LOG";

/// The filter if the variable is not set.
const DEFAULT: &str = "info";

/// Starts to log on standard error, in colours on a terminal.
///
/// # Errors
/// If the variable is invalid.
pub fn start() -> Result<()> {
    tracing_subscriber::fmt()
        .with_env_filter(filter(&variable()?)?)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
    Ok(())
}

/// Refuses an invalid variable, for this process and for those that it starts.
///
/// # Errors
/// With the variable and its invalid part.
pub fn check() -> Result<()> {
    filter(&variable()?).map(drop)
}

fn variable() -> Result<String> {
    match std::env::var(VARIABLE) {
        Ok(text) if !text.trim().is_empty() => Ok(text),
        Ok(_) | Err(std::env::VarError::NotPresent) => Ok(DEFAULT.to_owned()),
        Err(error) => Err(refusal("", error)),
    }
}

fn filter(text: &str) -> Result<EnvFilter> {
    // The filter would take a word that is no level for a module's name. It would then log all of
    // that module, and no other.
    let is_unclear = |part: &&str| {
        let part = part.trim();
        !part.is_empty() && !part.contains(['=', '[', ':']) && part.parse::<LevelFilter>().is_err()
    };
    if let Some(word) = text.split(',').find(is_unclear) {
        return Err(refusal(text, format!("'{}' is not a log level", word.trim())));
    }
    EnvFilter::try_new(text.replace(' ', "")).map_err(|error| refusal(text, error))
}

fn refusal(text: &str, why: impl std::fmt::Display) -> Failure {
    Failure::new(format!("reading {VARIABLE}={text}"), why).help(
        "write off, error, warn, info, debug or trace; \
             for one part only, for example info,aquifer_agent=debug",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_levels_of_modules_are_understood() {
        for text in [
            "debug",
            "INFO",
            "info,aquifer_agent=debug",
            "off",
            "warn, aquifer_volume::mover=trace",
        ] {
            assert!(filter(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn an_invalid_level_is_refused_by_name() {
        for (text, named) in [
            ("loud", "'loud'"),
            ("info,lout", "'lout'"),
            ("aquifer_agent=loud", "aquifer_agent=loud"),
        ] {
            assert!(filter(text).unwrap_err().to_string().contains(named), "{text}");
        }
    }
}
