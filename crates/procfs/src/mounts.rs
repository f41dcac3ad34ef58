//! `/proc/self/mounts` (proc_pid_mounts(5)).

use std::path::PathBuf;

use crate::unescape;

/// A mounted file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount<'a> {
    /// The place.
    pub path: PathBuf,
    /// The kind of file system.
    pub kind: &'a str,
    options: &'a str,
}

impl Mount<'_> {
    /// Returns whether it is mounted with this option.
    pub fn has(&self, option: &str) -> bool {
        self.options.split(',').any(|has| has == option)
    }
}

/// Returns the mounts in a text like `/proc/self/mounts`.
pub fn mounts(text: &str) -> impl Iterator<Item = Mount<'_>> {
    text.lines().filter_map(|line| {
        let mut words = line.split(' ').skip(1);
        let path = unescape(words.next()?).into();
        Some(Mount { path, kind: words.next()?, options: words.next()? })
    })
}
