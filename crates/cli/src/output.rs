//! The output of commands: text for people, JSON for programs.

use std::io::{self, IsTerminal, Write};

use serde::Serialize;

use crate::failure::{Failure, Result};

/// Prints a line on standard output.
///
/// A closed pipe (`aquifer status | head -1`) is no failure: the reader has its answer, and the
/// command goes on.
///
/// # Errors
/// If the line cannot be written for another reason, such as a full disk.
pub fn line(text: impl AsRef<str>) -> Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout
        .write_all(text.as_ref().as_bytes())
        .and_then(|()| stdout.write_all(b"\n"))
        .and_then(|()| stdout.flush());
    match written {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::new("writing to standard output", error))
        }
        _ => Ok(()),
    }
}

/// Prints `value` as one line of JSON on standard output.
///
/// # Errors
/// If `value` cannot be turned into JSON or written; see [`line()`].
pub fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|error| Failure::new("writing JSON", error))?;
    line(text)
}

/// Prints `value` as JSON if `as_json`, else the text that `text` makes of it.
///
/// # Errors
/// If it cannot be written; see [`line()`].
pub fn answer<T: Serialize>(
    as_json: bool,
    value: &T,
    text: impl FnOnce(&T) -> String,
) -> Result<()> {
    if as_json { json(value) } else { line(text(value)) }
}

/// Returns how many columns the terminal has; `None` if standard output is none.
pub fn width() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|columns| *columns > 0)
}

/// Returns whether standard output is a terminal with colours (`NO_COLOR` unset, `TERM` not dumb).
pub fn colours() -> bool {
    let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    io::stdout().is_terminal()
        && !set("NO_COLOR")
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// The colour of a word on a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colour {
    /// For good results.
    Green,
    /// For results that need attention.
    Yellow,
    /// For bad results.
    Red,
}

impl Colour {
    /// Returns `text` in this colour if `on`, else unchanged.
    pub fn paint(self, text: &str, on: bool) -> String {
        let code = match self {
            Self::Green => 32,
            Self::Yellow => 33,
            Self::Red => 31,
        };
        if on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }
}
