//! JSON files that processes read while others write them anew.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Puts a value into a file, in the place of what was in it: who reads it finds one or the other.
///
/// # Errors
/// The system's.
pub fn write(path: &Path, value: &impl Serialize) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut options = OpenOptions::new();
    // What is in some is for nobody else: keys, say.
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(&new)?.write_all(&serde_json::to_vec(value)?)?;
    fs::rename(&new, path)
}

/// What is in a file. None where there is no file.
///
/// # Errors
/// The system's; and `InvalidData` where it holds something else.
pub fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => Ok(Some(serde_json::from_slice(&read?)?)),
    }
}
