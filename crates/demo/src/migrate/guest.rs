//! The first process of the demo's guest: it rewrites memory, and answers over its serial port.

use std::io::{self, Write as _};
use std::sync::{Arc, Mutex};
use std::thread;

use aquifer_page::lock;
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

use crate::churn::{self, Load, Told};

/// The first word of an answer. The question, the tick of the latest report and the number of wrong
/// pages follow.
pub(super) const ANSWER: &str = "answer";

/// Rewrites memory and answers questions for ever.
///
/// # Errors
/// If the console fails.
pub fn run(load: Load) -> io::Result<()> {
    let is = Arc::new(Mutex::new(Told::default()));
    let stdin = io::stdin();
    // The terminal must not echo the questions.
    if let Ok(mut mode) = tcgetattr(&stdin) {
        mode.local_modes.remove(LocalModes::ECHO);
        tcsetattr(&stdin, OptionalActions::Now, &mode)?;
    }
    let now = is.clone();
    thread::spawn(move || {
        for question in stdin.lines().map_while(Result::ok) {
            let Told { tick, wrong, .. } = *lock(&now);
            if tick > 0 && say(format_args!("{ANSWER} {question} {tick} {wrong}")).is_err() {
                return;
            }
        }
    });
    churn::run(load, |told| {
        *lock(&is) = told;
        if told.tick % 10 == 1 {
            say(format_args!("churn {} {} {}", told.tick, told.pages, told.wrong))
        } else {
            Ok(())
        }
    })
}

fn say(what: std::fmt::Arguments<'_>) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{what}")?;
    out.flush()
}
