//! The port by which a VM's keeper and the agent inside its guest speak. That nobody else is at it is what makes a request the VM's own.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_inside::message::{Decoder, Line, Report, Stage, ToGuest, ToHost, encode};
use aquifer_page::Bytes;

/// How often a guest is to tell its figures.
pub(super) const PERIOD: Duration = Duration::from_secs(1);

/// Figures that are older say nothing of now.
pub(super) const FRESH: Duration = Duration::from_secs(4);

/// How long to wait until a port that is not there is tried again.
const AGAIN: Duration = Duration::from_millis(500);

/// A guest with less available than this share of its memory is near out-of-memory, or with less than this at least.
const URGENT: (u64, Bytes) = (16, Bytes::mib(32));

/// What a guest asks for.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Wanted {
    pub(super) bytes: i64,
    pub(super) urgent: bool,
    pub(super) patience: Duration,
    pub(super) why: String,
}

/// What it gets.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Granted {
    pub(super) bytes: i64,
    pub(super) size: Bytes,
    pub(super) missing: Bytes,
    pub(super) why: Option<String>,
}

/// A question of how much memory the guest has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question(u64);

#[derive(Debug, Default)]
struct State {
    stream: Option<UnixStream>,
    report: Option<(Report, Instant)>,
    /// What has come to questions that somebody waits for.
    checked: BTreeMap<u64, Report>,
    stages: BTreeMap<u64, Vec<Stage>>,
    questions: u64,
}

/// The host's end of it.
#[derive(Clone, Debug)]
pub(super) struct Port {
    path: PathBuf,
    state: Arc<Mutex<State>>,
    came: Arc<Condvar>,
}

impl Port {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), state: Arc::default(), came: Arc::default() }
    }

    /// Listens to the guest as long as this process lives, and has `grant` answer its requests, each on a thread of its own.
    pub(super) fn attend(
        &self,
        grant: impl Fn(Wanted) -> Granted + Clone + Send + 'static,
    ) -> io::Result<()> {
        let port = self.clone();
        let attending = move || {
            loop {
                // One that has gone comes again with the next agent, or with another QEMU.
                if let Err(error) = port.listen(&grant) {
                    tracing::debug!("the guest's port: {error}");
                }
                port.state().stream = None;
                thread::sleep(AGAIN);
            }
        };
        thread::Builder::new().name("port".to_owned()).spawn(attending).map(drop)
    }

    fn listen(&self, grant: &(impl Fn(Wanted) -> Granted + Clone + Send + 'static)) -> io::Result<()> {
        let mut stream = UnixStream::connect(&self.path)?;
        stream.set_write_timeout(Some(PERIOD))?;
        self.state().stream = Some(stream.try_clone()?);
        self.greet();
        let mut decoder = Decoder::<ToHost>::new();
        let mut bytes = [0; 4096];
        loop {
            let count = match stream.read(&mut bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                read => read?,
            };
            decoder.take(&bytes[..count], |line| {
                if let Line::Message(message) = line {
                    self.heard(message, grant);
                }
            });
        }
    }

    fn heard(&self, message: ToHost, grant: &(impl Fn(Wanted) -> Granted + Clone + Send + 'static)) {
        match message {
            ToHost::Hello { version, kernel } => {
                tracing::info!("the guest's agent is there: version {version}, kernel {kernel}");
                self.greet();
            }
            ToHost::Report(report) => {
                let total = report.total;
                let before = self.state().report.replace((report, Instant::now()));
                // What is little depends on what it has.
                if before.is_none_or(|(before, _)| before.total != total) {
                    self.watch();
                }
            }
            ToHost::Checked { id, report } => {
                let mut state = self.state();
                state.report = Some((report.clone(), Instant::now()));
                state.checked.retain(|other, _| *other > id);
                state.checked.insert(id, report);
                drop(state);
                self.came.notify_all();
            }
            ToHost::Stages { id, stages, .. } => {
                let mut state = self.state();
                // What nobody has waited for.
                state.stages.retain(|other, _| *other > id);
                state.stages.insert(id, stages);
                drop(state);
                self.came.notify_all();
            }
            ToHost::Request { id, bytes, urgent, patience_ms, why } => {
                let wanted = Wanted { bytes, urgent, patience: Duration::from_millis(patience_ms), why };
                let (port, grant) = (self.clone(), grant.clone());
                let answering = thread::Builder::new().name("request".to_owned()).spawn(move || {
                    let Granted { bytes: granted, size, missing, why } = grant(wanted);
                    port.say(&ToGuest::Answer { id, granted, size, missing, why });
                });
                if let Err(error) = answering {
                    tracing::error!("cannot start a thread for a guest's request: {error}");
                }
            }
        }
    }

    /// Says what the guest is to look after.
    fn watch(&self) {
        let total = self.latest().map_or(Bytes::ZERO, |report| report.total);
        let urgent_below = Bytes(total.0 / URGENT.0).max(URGENT.1);
        self.say(&ToGuest::Watch { period_ms: PERIOD.as_millis() as u64, urgent_below });
    }

    /// Says what an agent that is new must know.
    fn greet(&self) {
        self.watch();
        let id = self.question();
        self.say(&ToGuest::Trace { id, on: true });
    }

    /// Whether it could be said. Nobody hears it where no agent is there.
    fn say(&self, message: &ToGuest) -> bool {
        let Ok(line) = encode(message) else { return false };
        let mut state = self.state();
        let Some(stream) = &mut state.stream else { return false };
        stream.write_all(&line).is_ok()
    }

    fn question(&self) -> u64 {
        let mut state = self.state();
        state.questions += 1;
        state.questions
    }

    /// The newest figures, if they are new enough.
    pub(super) fn latest(&self) -> Option<Report> {
        let state = self.state();
        state.report.as_ref().filter(|(_, at)| at.elapsed() < FRESH).map(|(report, _)| report.clone())
    }

    /// Has the guest say what it has, as soon as it counts so much.
    pub(super) fn ask(&self, total: Bytes) -> Option<Question> {
        // Who has said nothing lately does not listen.
        self.latest()?;
        let id = self.question();
        self.say(&ToGuest::Check { id, total }).then_some(Question(id))
    }

    /// What it has said, if it has by then.
    pub(super) fn answer(&self, question: Question, patience: Duration) -> Option<Report> {
        self.wait(patience, |state| state.checked.remove(&question.0))
    }

    /// What stages of resizes took in the guest since the last time.
    pub(super) fn stages(&self, patience: Duration) -> Vec<Stage> {
        let id = self.question();
        if self.latest().is_none() || !self.say(&ToGuest::Trace { id, on: true }) {
            return Vec::new();
        }
        self.wait(patience, |state| state.stages.remove(&id)).unwrap_or_default()
    }

    fn wait<T>(&self, patience: Duration, mut found: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + patience;
        let mut state = self.state();
        loop {
            if let Some(found) = found(&mut state) {
                return Some(found);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            (state, _) = self.came.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
