//! What a process that stays says to the one that started it: one JSON object, one line, on its standard output.

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::process::Child;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Says it. The starter may be gone.
pub fn say(word: &impl Serialize) {
    let mut out = io::stdout().lock();
    let _ =
        serde_json::to_writer(&mut out, word).map_err(io::Error::from).and_then(|()| out.write_all(b"\n"));
    let _ = out.flush();
}

/// Has who waits for the word find the end behind it: what is said from now on goes where errors go.
///
/// # Errors
/// The system's.
pub fn is_said() -> io::Result<()> {
    Ok(rustix::stdio::dup2_stdout(io::stderr())?)
}

/// Waits for the word of a process whose standard output is a pipe. None where it ended without one.
///
/// # Errors
/// The system's.
pub fn heard<T: DeserializeOwned>(child: &mut Child) -> io::Result<Option<T>> {
    let output = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let mut line = String::new();
    BufReader::new(output).read_line(&mut line)?;
    Ok(serde_json::from_str(&line).ok())
}
