//! A host's console.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::lock;

/// How many lines of the console an error shows.
const TAIL_LINES: usize = 40;

/// How long [`Console::ask`] waits for the answer; [`SILENCE_TIMEOUT`] without output ends the
/// wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(4);
const SILENCE_TIMEOUT: Duration = Duration::from_millis(700);

/// A host's console over all its boots, with QEMU's own messages.
#[derive(Debug)]
pub(crate) struct Console {
    host: String,
    live: bool,
    text: Mutex<String>,
    /// Where in the text the answer to [`Self::ask`] begins, if it was asked in this boot.
    answer: Mutex<Option<usize>>,
    keyboard: Mutex<Option<UnixStream>>,
}

impl Console {
    pub(crate) fn new(host: &str, live: bool) -> Arc<Self> {
        let host = host.to_owned();
        Arc::new(Self {
            host,
            live,
            text: Mutex::default(),
            answer: Mutex::default(),
            keyboard: Mutex::default(),
        })
    }

    /// Adds the data from `stream` until it ends, on a thread of its own.
    pub(crate) fn show(self: &Arc<Self>, mut stream: UnixStream) {
        let console = self.clone();
        thread::spawn(move || {
            let mut buffer = vec![0; 4096];
            while let Ok(len @ 1..) = stream.read(&mut buffer) {
                console.add(&String::from_utf8_lossy(&buffer[..len]).replace('\r', ""));
            }
        });
    }

    /// Sets the stream on which [`Self::ask`] types; a new boot has no answer yet.
    pub(crate) fn connect(&self, keyboard: UnixStream) {
        *lock(&self.keyboard) = Some(keyboard);
        *lock(&self.answer) = None;
    }

    /// Adds a line from the testbed itself.
    pub(crate) fn note(&self, what: &str) {
        self.add(&format!("\n[testbed: {what}]\n"));
    }

    fn add(&self, text: &str) {
        if self.live {
            print!("{text}");
            let _ = std::io::stdout().flush();
        }
        lock(&self.text).push_str(text);
    }

    /// Returns the text of all boots.
    pub(crate) fn text(&self) -> String {
        lock(&self.text).clone()
    }

    /// Asks the kernel, by SysRq, for its memory, its blocked tasks and its running tasks. A serial
    /// break (ctrl-A b in QEMU) and a key work however badly the guest is stuck.
    pub(crate) fn ask(&self) {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        *lock(&self.answer) = Some(self.text().len());
        for key in *b"8mwl" {
            if let Some(keyboard) = &mut *lock(&self.keyboard) {
                let _ = keyboard.write_all(&[1, b'b', key]);
            }
            self.wait_for_silence(deadline);
        }
    }

    fn wait_for_silence(&self, deadline: Instant) {
        let len = || lock(&self.text).len();
        let (mut said, mut since) = (len(), Instant::now());
        while since.elapsed() < SILENCE_TIMEOUT && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(20));
            if len() != said {
                (said, since) = (len(), Instant::now());
            }
        }
    }

    /// Returns an error about this host, with the end of its console.
    pub(crate) fn failure(&self, what: impl fmt::Display) -> anyhow::Error {
        anyhow::anyhow!("host {}: {what}\n{}", self.host, self.tail())
    }

    /// Returns the last lines and the answer to [`Self::ask`], under a heading.
    pub(crate) fn tail(&self) -> String {
        let text = self.text();
        let answer = *lock(&self.answer);
        let (before, answer) =
            text.split_at_checked(answer.unwrap_or(text.len())).unwrap_or((&text, ""));
        let lines: Vec<_> = before.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = &lines[lines.len().saturating_sub(TAIL_LINES)..];
        format!(
            "---- the end of {}'s console:\n{}\n{}\n----",
            self.host,
            last.join("\n"),
            answer.trim()
        )
    }
}
