//! The programs that the demos start: this one in guests, and `aquifer` beside it on hosts.

use std::path::PathBuf;

use aquifer_cli::failure::{Failure, OrFail, Result};

/// Returns the path of `aquifer-demo`, which is the first process of the demos' guests.
pub(crate) fn this() -> Result<PathBuf> {
    std::env::current_exe().or_fail(|| "finding this program")
}

/// Returns the path of `aquifer`, which lies beside `aquifer-demo`.
pub(crate) fn aquifer() -> Result<PathBuf> {
    let path = this()?.with_file_name("aquifer");
    if path.is_file() {
        return Ok(path);
    }
    let why = format!("there is no {}", path.display());
    Err(Failure::new("finding 'aquifer'", why).help("install 'aquifer' beside 'aquifer-demo'"))
}
