use std::path::{Path, PathBuf};

use crate::error::RegionError;

/// The library that lends a region to an unmodified program.
const SHIM: &str = "libaquifer_shim.so";

/// Where the shim is: beside this program, or in the lib directory beside its own.
///
/// # Errors
/// If it is in neither.
pub fn shim(program: &Path) -> Result<PathBuf, RegionError> {
    let beside = program.parent().unwrap_or(program);
    let places = [beside.join(SHIM), beside.join("../lib").join(SHIM)];
    places.iter().find(|path| path.exists()).cloned().ok_or_else(|| {
        let [one, other] = places.each_ref().map(|path| path.display());
        RegionError::Misuse(format!(
            "{SHIM} is neither {one} nor {other}: install it there; 'make install' does"
        ))
    })
}
