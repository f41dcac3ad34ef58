//! Taking in those who connect, for as long as the process lives.

use std::io;
use std::thread;
use std::time::Duration;

/// How long it is waited when nobody can be taken in: for want of descriptors, memory or threads, most likely, and others give them back.
const PAUSE: Duration = Duration::from_millis(100);

/// Hands each that is accepted to `begin`, for ever. What cannot be now is told once, and tried again after a pause.
pub(super) fn each<T>(
    who: &str,
    mut accept: impl FnMut() -> io::Result<T>,
    mut begin: impl FnMut(T) -> io::Result<()>,
) -> ! {
    let mut fails = false;
    loop {
        match accept().and_then(&mut begin) {
            Ok(()) => fails = false,
            Err(error) => {
                if !std::mem::replace(&mut fails, true) {
                    tracing::error!("cannot take in {who}: {error}; it is tried again");
                }
                thread::sleep(PAUSE);
            }
        }
    }
}
