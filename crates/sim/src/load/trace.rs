//! Demand from a trace: lines of `seconds,host,bytes`.

use std::collections::BTreeMap;
use std::time::Duration;

use aquifer_page::{Bytes, HostName, NameError, ParseBytesError};

use super::Load;

/// The reason why a text is not a trace.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// A line does not have three fields.
    #[error("line {0} does not have the three fields seconds,host,bytes")]
    Fields(usize),
    /// The time is not a number of seconds.
    #[error("line {0}: '{1}' is not a number of seconds from zero up")]
    Seconds(usize, String),
    /// A time precedes the one before it.
    #[error("line {0}: the times of {1} go back; sort the lines by their seconds")]
    Order(usize, HostName),
    /// The host is not a name.
    #[error("line {0}: {1}")]
    Host(usize, #[source] NameError),
    /// The demand is not a size.
    #[error("line {0}: {1}")]
    Bytes(usize, #[source] ParseBytesError),
    /// The trace has no line.
    #[error("the trace has no line")]
    Empty,
}

/// Reads a trace: the demand of a host holds from its second until the host's next line. Empty
/// lines, comments after `#` and a first line that begins with `seconds` are ignored.
///
/// # Errors
/// Names the first line that is malformed.
pub fn read_trace(text: &str) -> Result<Vec<(HostName, Load)>, TraceError> {
    let mut hosts: BTreeMap<HostName, Vec<(Duration, Bytes)>> = BTreeMap::new();
    for (line, number) in text.lines().zip(1..) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() || (number == 1 && line.starts_with("seconds")) {
            continue;
        }
        let (at, host, bytes) = read_line(line, number)?;
        let steps = hosts.entry(host.clone()).or_default();
        if steps.last().is_some_and(|(before, _)| *before > at) {
            return Err(TraceError::Order(number, host));
        }
        steps.push((at, bytes));
    }
    match hosts.is_empty() {
        true => Err(TraceError::Empty),
        false => Ok(hosts.into_iter().map(|(host, steps)| (host, Load::Steps(steps))).collect()),
    }
}

fn read_line(line: &str, number: usize) -> Result<(Duration, HostName, Bytes), TraceError> {
    let fields: Vec<_> = line.split(',').map(str::trim).collect();
    let [seconds, host, bytes] = fields[..] else { return Err(TraceError::Fields(number)) };
    let at = seconds.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let at = at.ok_or_else(|| TraceError::Seconds(number, seconds.to_owned()))?;
    let host = host.parse().map_err(|error| TraceError::Host(number, error))?;
    let bytes = bytes.parse().map_err(|error| TraceError::Bytes(number, error))?;
    Ok((at, host, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn demand_holds_until_the_next_line_of_its_host() {
        let trace = "seconds,host,bytes\n0,a,1G\n0,b,4096 # b idles\n\n2.5,a,2G\n";
        let mut hosts = read_trace(trace).unwrap();
        assert_eq!(hosts.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        let at = |load: &mut Load, millis| load.demand(Duration::from_millis(millis));
        assert_eq!(at(&mut hosts[0].1, 2499), Bytes::gib(1));
        assert_eq!(at(&mut hosts[0].1, 2500), Bytes::gib(2));
        assert_eq!(at(&mut hosts[1].1, 9000), Bytes(4096));
    }

    #[test]
    fn a_malformed_line_is_named() {
        for (trace, named) in [
            ("0,a", "line 1 does not"),
            ("0,a,1G\n-1,a,1G", "line 2: '-1'"),
            ("0,a b,1G", "line 1: 'a b'"),
            ("0,a,much", "line 1: 'much'"),
            ("5,a,1G\n4,a,1G", "line 2: the times of a"),
            ("# nothing", "no line"),
        ] {
            let error = read_trace(trace).unwrap_err().to_string();
            assert!(error.contains(named), "{error}");
        }
    }
}
