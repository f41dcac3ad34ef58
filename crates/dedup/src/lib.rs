//! The search for equal pages of a group's regions on a host (\[Kim14\], section 4.1).
//!
//! Each group has its own scanner, which sees no pages of other groups. The scanner passes over all
//! pages in the local caches of the group's regions, again and again. Pages of zeroes need no
//! memory. A page that is unchanged since the last look is compared with the shared pages (the
//! stable set). If none is equal, the page is compared with other unchanged pages, which may still
//! change (the unstable set, emptied after each pass). A page that stays unchanged and unequal is
//! looked at less and less often (`scan_history`).
//!
//! The scanner proposes equal pages to the regions' engines. The engines compare the pages byte by
//! byte while no program can write to them.
//!
//! The engines' files record the shared pages. So a scanner that ends leaves them shared, and the
//! next one goes on.

pub mod cpu_billing;
mod member;
mod report;
mod running;
mod scan_history;
mod scanner;

use std::io;
use std::path::{Path, PathBuf};

use aquifer_page::Group;
use aquifer_region::RegionError;

pub use member::{Looked, Members};
pub use report::{ScanReport, Sharing, sharing};
pub use running::{RunningScanner, ScannerFiles, ScannerLock, ScannerTerms};
pub use scanner::{Counts, Scanner, join_cgroup};

/// An error that prevents scanning.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// An operation on a file failed.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another scanner of the group is at work.
    #[error(
        "another 'aquifer serve dedup', perhaps of the host's agent, scans the pages of group \
         '{0}' already: 'aquifer group show {0}' names its process"
    )]
    Busy(Group),
    /// An operation on a region failed.
    #[error(transparent)]
    Region(#[from] RegionError),
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ScanError {
    let path = path.to_owned();
    move |source| ScanError::Io { what, path, source }
}
