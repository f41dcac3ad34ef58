//! Accept loop that outlasts failures.

use std::io;
use std::mem;
use std::thread;
use std::time::Duration;

/// Pause after a connection that could not be accepted.
///
/// The usual cause is a lack of descriptors, memory or threads, and other connections must end
/// first.
pub const PAUSE: Duration = Duration::from_millis(100);

/// Hands each connection to `begin` until `is_over` returns true; checks `is_over` whenever
/// `accept` returns.
///
/// A failure does not end the loop. The loop logs the first failure of a series, pauses for
/// [`PAUSE`] and accepts again.
pub fn each<T>(
    callers: &str,
    is_over: impl Fn() -> bool,
    mut accept: impl FnMut() -> io::Result<T>,
    mut begin: impl FnMut(T) -> io::Result<()>,
) {
    let mut fails = false;
    loop {
        let accepted = accept();
        if is_over() {
            return;
        }
        match accepted.and_then(&mut begin) {
            Ok(()) => fails = false,
            Err(error) => {
                if !mem::replace(&mut fails, true) {
                    tracing::error!("cannot accept {callers}: {error}; trying again");
                }
                thread::sleep(PAUSE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn failures_end_nothing() {
        let results = [
            Ok(1),
            Err(rustix::io::Errno::MFILE),
            Ok(2),
            Ok(3),
            Err(rustix::io::Errno::MFILE),
            Ok(4),
        ];
        let mut results = results.into_iter();
        let begun = RefCell::new(Vec::new());
        let accept = || results.next().expect("over by now").map_err(io::Error::from);
        each(
            "clients",
            || begun.borrow().len() == 3,
            accept,
            |number| {
                begun.borrow_mut().push(number);
                if number == 2 { Err(io::ErrorKind::OutOfMemory.into()) } else { Ok(()) }
            },
        );
        assert_eq!(*begun.borrow(), [1, 2, 3]);
    }
}
