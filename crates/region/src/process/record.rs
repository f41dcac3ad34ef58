//! JSON files that processes read while others replace them.

use std::fs;
use std::io;
use std::path::Path;

use aquifer_page::file;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Replaces a file's content with a value. A reader finds the old or the new value.
///
/// # Errors
/// The system's.
pub fn write(path: &Path, value: &impl Serialize) -> io::Result<()> {
    file::replace(path, &serde_json::to_vec(value)?)
}

/// Reads the value in a file. Returns `None` if there is no file.
///
/// # Errors
/// The system's; `InvalidData` if the file holds another type of value.
pub fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => Ok(Some(serde_json::from_slice(&read?)?)),
    }
}
