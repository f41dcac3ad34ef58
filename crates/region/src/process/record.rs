//! JSON files that processes read while others write them anew.

use std::fs;
use std::io;
use std::path::Path;

use aquifer_page::file;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Puts a value into a file, in the place of what was in it: who reads it finds one or the other.
///
/// # Errors
/// The system's.
pub fn write(path: &Path, value: &impl Serialize) -> io::Result<()> {
    file::replace(path, &serde_json::to_vec(value)?)
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
