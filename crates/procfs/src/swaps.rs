//! The kernel's table of swap areas, `/proc/swaps`.

use std::io;
use std::path::{Path, PathBuf};

use aquifer_page::Bytes;
use serde::{Deserialize, Serialize};

use crate::{invalid, unescape};

/// A line of `/proc/swaps`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Swap {
    /// The device or file.
    pub path: PathBuf,
    /// Size of the area.
    pub size: Bytes,
    /// Bytes swapped out to it.
    pub used: Bytes,
    /// Priority; the kernel uses higher ones first, and assigns negative ones itself.
    pub priority: i32,
}

/// Returns all active swap areas.
pub fn swaps() -> io::Result<Vec<Swap>> {
    parse(&std::fs::read_to_string("/proc/swaps")?)
}

/// Returns the bytes swapped out to `device`, or `None` if swap is not on there.
pub fn usage(device: &Path) -> io::Result<Option<Bytes>> {
    Ok(swaps()?.into_iter().find(|swap| swap.path == device).map(|swap| swap.used))
}

fn parse(text: &str) -> io::Result<Vec<Swap>> {
    text.lines().skip(1).map(|line| parse_line(line).ok_or_else(|| malformed(line))).collect()
}

fn malformed(line: &str) -> io::Error {
    invalid(format!("cannot understand this line of /proc/swaps: {line}"))
}

/// Parses `path type size used priority`, sizes in KiB. The path is padded with spaces, and its own
/// are escaped.
fn parse_line(line: &str) -> Option<Swap> {
    let mut fields = line.split_ascii_whitespace();
    let path = PathBuf::from(unescape(fields.next()?));
    let _type = fields.next()?;
    Some(Swap {
        path,
        size: Bytes::kib(fields.next()?.parse().ok()?),
        used: Bytes::kib(fields.next()?.parse().ok()?),
        priority: fields.next()?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_and_files_with_spaces_are_read() {
        let text = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
                    /dev/loop0                              partition\t2097148\t\t1024\t\t-2\n\
                    /var/swap\\040file                       file\t\t1024\t\t0\t\t5\n";
        let swaps = parse(text).unwrap();
        assert_eq!(swaps[0].path, Path::new("/dev/loop0"));
        assert_eq!((swaps[0].used, swaps[0].priority), (Bytes::mib(1), -2));
        assert_eq!(swaps[1].path, Path::new("/var/swap file"));
        assert_eq!(swaps[1].size, Bytes::mib(1));
    }

    #[test]
    fn a_host_without_swap_has_none() {
        assert_eq!(parse("Filename\tType\tSize\tUsed\tPriority\n").unwrap(), []);
    }

    #[test]
    fn an_unknown_format_is_an_error_that_shows_the_line() {
        let error = parse("head\n/dev/sda1 partition many").unwrap_err();
        assert!(error.to_string().contains("/dev/sda1 partition many"));
    }
}
