//! The path of the preloaded library.

use std::path::{Path, PathBuf};

use crate::error::RegionError;

/// The file name of the library that gives a region to an unmodified program.
const LIBRARY: &str = "libaquifer_preload.so";

/// Returns the path of the library: beside `program`, or in the `lib` directory beside the
/// program's own.
///
/// # Errors
/// The library is in neither place.
pub fn preload_library(program: &Path) -> Result<PathBuf, RegionError> {
    let beside = program.parent().unwrap_or(program);
    let places = [beside.join(LIBRARY), beside.join("../lib").join(LIBRARY)];
    places.iter().find(|path| path.exists()).cloned().ok_or_else(|| {
        let [one, other] = places.each_ref().map(|path| path.display());
        RegionError::Misuse(format!(
            "cannot find {LIBRARY} as {one} or {other}; install it with 'make install'"
        ))
    })
}
