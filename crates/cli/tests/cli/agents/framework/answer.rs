//! The answers of commands.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::STEP_TIMEOUT;

/// The exit code and the output of a command.
#[derive(Debug)]
pub struct Answer {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Answer {
    /// Runs `command` to its end.
    ///
    /// # Panics
    /// If it takes longer than [`STEP_TIMEOUT`].
    #[track_caller]
    pub fn of(command: &mut Command) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let deadline = Instant::now() + STEP_TIMEOUT;
        let in_time = loop {
            if process.try_wait().unwrap().is_some() {
                break true;
            }
            if Instant::now() > deadline {
                process.kill().unwrap();
                break false;
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        // The output fits into a pipe, so it can be read after the end.
        let Output { status, stdout, stderr } = process.wait_with_output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        let answer = Self { code: status.code(), stdout: text(stdout), stderr: text(stderr) };
        assert!(in_time, "the command took longer than {STEP_TIMEOUT:?}: {command:?}: {answer:?}");
        answer
    }

    /// Asserts that the command failed with this exit code and an error that has all of `words`.
    #[track_caller]
    pub fn must_fail(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        for word in words {
            assert!(self.stderr.contains(word), "does not say '{word}': {}", self.stderr);
        }
    }

    /// Asserts that the command succeeded; returns its JSON.
    #[track_caller]
    pub fn json<T: DeserializeOwned>(&self) -> T {
        assert_eq!(self.code, Some(0), "{self:?}");
        serde_json::from_str(&self.stdout).unwrap()
    }
}
