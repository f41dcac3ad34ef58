//! The panic hook: a panic in any thread ends the process.
//!
//! A server must not go on without one of its threads. Clients of that thread would wait for ever,
//! and the supervisor would see no failure. `panic = "abort"` in the profiles would do the same,
//! but would compile all dependencies twice for tests.

use std::panic;
use std::process::abort;

/// Makes every panic end the process by `SIGABRT`, after its message on standard error.
pub fn end_the_process() {
    let tell = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        tell(info);
        eprintln!("aquifer: this is a bug in aquifer: a thread failed, so the process ends");
        abort();
    }));
    #[cfg(debug_assertions)]
    on_order::wait();
}

/// For tests: with `AQUIFER_TEST_PANIC=FILE`, a process panics in a thread when FILE.PID exists.
#[cfg(debug_assertions)]
mod on_order {
    use std::path::Path;
    use std::thread;
    use std::time::Duration;

    pub(super) fn wait() {
        let Ok(file) = std::env::var("AQUIFER_TEST_PANIC") else { return };
        let file = format!("{file}.{}", std::process::id());
        let started = thread::Builder::new().name("panics".to_owned()).spawn(move || {
            while !Path::new(&file).exists() {
                thread::sleep(Duration::from_millis(20));
            }
            panic!("as {file} says");
        });
        started.map(drop).unwrap_or_default();
    }
}
