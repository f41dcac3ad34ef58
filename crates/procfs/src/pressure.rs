//! Pressure stall information, of the host or of a cgroup (kernel's accounting/psi.rst).

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use rustix::fs::OFlags;

/// Returns a figure (`avg10`, `total`) of a line (`some`, `full`) of a pressure file's text. The
/// unit is percent, or µs for `total`.
pub fn pressure<T: FromStr>(text: &str, line: &str, figure: &str) -> Option<T> {
    let figures = text.lines().find_map(|text| text.strip_prefix(line)?.strip_prefix(' '))?;
    let value = |word: &str| word.strip_prefix(figure)?.strip_prefix('=')?.parse().ok();
    figures.split(' ').find_map(value)
}

/// Opens a pressure file with a trigger: the file has a priority event once some tasks have stalled
/// for `stall` within `window`. Without CAP_SYS_RESOURCE, `window` must be a multiple of 2 s.
pub fn arm_trigger(path: &Path, stall: Duration, window: Duration) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let nonblocking = OFlags::NONBLOCK.bits() as i32;
    let mut file = options.read(true).write(true).custom_flags(nonblocking).open(path)?;
    // The kernel takes a trigger in one write, with its terminating zero.
    let trigger = format!("some {} {}\0", stall.as_micros(), window.as_micros());
    file.write_all(trigger.as_bytes())?;
    Ok(file)
}
