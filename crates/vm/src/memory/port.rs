//! The port between a VM's supervisor and the agent in its guest. A port belongs to one VM, so a
//! request on it is that VM's own.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_guest_agent::message::{Decoder, GuestReport, Line, Stage, ToGuest, ToHost, encode};
use aquifer_page::{Bytes, lock};

/// How often the guest sends figures.
pub(super) const PERIOD: Duration = Duration::from_secs(1);

/// Figures that are older than this are stale.
pub(super) const FRESH: Duration = Duration::from_secs(4);

/// Pause before a missing port is tried again.
const AGAIN: Duration = Duration::from_millis(500);

/// A guest is near out-of-memory with less available than one part in this many of its memory, or
/// than this size.
const URGENT: (u64, Bytes) = (16, Bytes::mib(32));

/// Most requests of a guest in progress, each on a thread of its own: the guest decides how many it
/// makes.
const MOST_REQUESTS: usize = 16;

/// Further requests that are accepted if they are urgent.
const MORE_IF_URGENT: usize = 2;

/// Most answers kept for waiting threads: answers without a question must not pile up.
const MOST_KEPT: usize = 16;

/// Longest time that a guest can make the host look for memory.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

/// A guest's request.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Wanted {
    pub(super) bytes: i64,
    pub(super) urgent: bool,
    pub(super) timeout: Duration,
    pub(super) why: String,
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Granted {
    pub(super) bytes: i64,
    pub(super) size: Bytes,
    pub(super) missing: Bytes,
    pub(super) why: Option<String>,
}

/// The number of a question about the guest's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question(u64);

#[derive(Debug, Default)]
struct State {
    stream: Option<UnixStream>,
    report: Option<(GuestReport, Instant)>,
    /// Answers to questions, until the thread that asked takes them.
    checked: BTreeMap<u64, GuestReport>,
    stages: BTreeMap<u64, Vec<Stage>>,
    questions: u64,
    /// Requests in progress.
    requests: usize,
    /// Whether the log already says that requests were refused.
    said: bool,
}

/// A request in progress. Dropping it makes room for another.
struct Accepted(Port);

impl Drop for Accepted {
    fn drop(&mut self) {
        self.0.state().requests -= 1;
    }
}

/// The host's end of the port.
#[derive(Clone, Debug)]
pub(super) struct Port {
    path: PathBuf,
    made: Instant,
    state: Arc<Mutex<State>>,
    came: Arc<Condvar>,
}

impl Port {
    pub(super) fn new(path: &Path) -> Self {
        let (path, made) = (path.to_owned(), Instant::now());
        Self { path, made, state: Arc::default(), came: Arc::default() }
    }

    /// Listens to the guest while this process lives. `grant` answers its requests, a bounded
    /// number at a time; the rest are refused.
    pub(super) fn attend(
        &self,
        grant: impl Fn(Wanted) -> Granted + Clone + Send + 'static,
    ) -> io::Result<()> {
        let port = self.clone();
        let attending = move || {
            loop {
                // The port comes back with the next agent, or with another QEMU.
                if let Err(error) = port.listen(&grant) {
                    tracing::debug!("the guest's port: {error}");
                }
                port.state().stream = None;
                thread::sleep(AGAIN);
            }
        };
        thread::Builder::new().name("port".to_owned()).spawn(attending).map(drop)
    }

    fn listen(
        &self,
        grant: &(impl Fn(Wanted) -> Granted + Clone + Send + 'static),
    ) -> io::Result<()> {
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

    fn heard(
        &self,
        message: ToHost,
        grant: &(impl Fn(Wanted) -> Granted + Clone + Send + 'static),
    ) {
        match message {
            ToHost::Hello { version, kernel } => {
                tracing::info!("the guest's agent connected: version {version}, kernel {kernel}");
                self.greet();
            }
            ToHost::Report(report) => {
                let total = report.total;
                let before = self.state().report.replace((report, Instant::now()));
                // The threshold of urgency depends on the guest's memory.
                if before.is_none_or(|(before, _)| before.total != total) {
                    self.watch();
                }
            }
            ToHost::Checked { id, report } => {
                let mut state = self.state();
                state.report = Some((report.clone(), Instant::now()));
                let asked = state.questions;
                keep(&mut state.checked, id, asked, report);
                drop(state);
                self.came.notify_all();
            }
            ToHost::Stages { id, stages, .. } => {
                let mut state = self.state();
                let asked = state.questions;
                keep(&mut state.stages, id, asked, stages);
                drop(state);
                self.came.notify_all();
            }
            ToHost::Request { id, bytes, urgent, timeout_ms, why } => {
                let timeout = Duration::from_millis(timeout_ms).min(LONGEST_TIMEOUT);
                self.requested(id, Wanted { bytes, urgent, timeout, why }, grant);
            }
        }
    }

    /// Starts a thread for a request; refuses the request if there are too many, or no thread can
    /// start.
    fn requested(
        &self,
        id: u64,
        wanted: Wanted,
        grant: &(impl Fn(Wanted) -> Granted + Clone + Send + 'static),
    ) {
        let missing = Bytes(wanted.bytes.unsigned_abs());
        let answered = self.accept(wanted.urgent).and_then(|accepted| {
            let grant = grant.clone();
            let answering = thread::Builder::new().name("request".to_owned()).spawn(move || {
                let Granted { bytes: granted, size, missing, why } = grant(wanted);
                accepted.0.say(&ToGuest::Answer { id, granted, size, missing, why });
            });
            answering
                .map(drop)
                .map_err(|error| format!("the host cannot process the request: {error}"))
        });
        if let Err(why) = answered {
            if !std::mem::replace(&mut self.state().said, true) {
                tracing::warn!(
                    "refused a request of the guest; refusals after this one are not logged: {why}"
                );
            }
            let size = self.latest().map_or(Bytes::ZERO, |report| report.total);
            self.say(&ToGuest::Answer { id, granted: 0, size, missing, why: Some(why) });
        }
    }

    /// Takes room for a request, or says why there is none.
    fn accept(&self, urgent: bool) -> Result<Accepted, String> {
        let most = MOST_REQUESTS + if urgent { MORE_IF_URGENT } else { 0 };
        let mut state = self.state();
        if state.requests >= most {
            return Err(format!(
                "the host processes {} requests of this guest already: ask again later",
                state.requests
            ));
        }
        state.requests += 1;
        Ok(Accepted(self.clone()))
    }

    /// Tells the guest when to report, and when its memory is urgently low.
    fn watch(&self) {
        let total = self.latest().map_or(Bytes::ZERO, |report| report.total);
        let urgent_below = Bytes(total.0 / URGENT.0).max(URGENT.1);
        self.say(&ToGuest::Watch { period_ms: PERIOD.as_millis() as u64, urgent_below });
    }

    /// Tells a new agent its settings.
    fn greet(&self) {
        self.watch();
        let id = self.question();
        self.say(&ToGuest::Trace { id, on: true });
    }

    /// Sends a message; returns whether that succeeded. Without an agent, nothing receives it.
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

    /// Returns the newest figures, if they are fresh.
    pub(super) fn latest(&self) -> Option<GuestReport> {
        let state = self.state();
        state
            .report
            .as_ref()
            .filter(|(_, at)| at.elapsed() < FRESH)
            .map(|(report, _)| report.clone())
    }

    /// Returns whether an agent may still send its first figures to this process.
    pub(super) fn awaits_first_report(&self) -> bool {
        self.made.elapsed() < FRESH && !self.has_report()
    }

    /// Returns whether an agent has sent figures, fresh or not.
    pub(super) fn has_report(&self) -> bool {
        self.state().report.is_some()
    }

    /// Asks the guest for its figures once it counts `total`.
    pub(super) fn ask(&self, total: Bytes) -> Option<Question> {
        // An agent that has been silent lately does not listen.
        self.latest()?;
        let id = self.question();
        self.say(&ToGuest::Check { id, total }).then_some(Question(id))
    }

    /// Waits up to `timeout` for the answer to a question.
    pub(super) fn answer(&self, question: Question, timeout: Duration) -> Option<GuestReport> {
        self.wait(timeout, |state| state.checked.remove(&question.0))
    }

    /// Returns how long the stages of resizes took in the guest since the last call.
    pub(super) fn stages(&self, timeout: Duration) -> Vec<Stage> {
        let id = self.question();
        if self.latest().is_none() || !self.say(&ToGuest::Trace { id, on: true }) {
            return Vec::new();
        }
        self.wait(timeout, |state| state.stages.remove(&id)).unwrap_or_default()
    }

    fn wait<T>(
        &self,
        timeout: Duration,
        mut found: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let deadline = Instant::now() + timeout;
        let mut state = self.state();
        loop {
            if let Some(found) = found(&mut state) {
                return Some(found);
            }
            let left = deadline.checked_duration_since(Instant::now())?;
            (state, _) =
                self.came.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// Keeps the answer to a question that was asked, and drops those to earlier questions.
fn keep<T>(answers: &mut BTreeMap<u64, T>, id: u64, asked: u64, answer: T) {
    answers.retain(|other, _| *other > id);
    if id <= asked {
        answers.insert(id, answer);
    }
    while answers.len() > MOST_KEPT {
        answers.pop_first();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::collections::BTreeSet;
    use std::io::{BufRead as _, BufReader};
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc;

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(60);

    /// A port with a guest at its other end, whose requests wait until they are released.
    struct Guest {
        stream: UnixStream,
        let_go: mpsc::Sender<()>,
        begun: mpsc::Receiver<bool>,
        _dir: tempfile::TempDir,
        port: Port,
    }

    fn guest() -> Guest {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        let (let_go, go) = mpsc::channel::<()>();
        let (begins, begun) = mpsc::channel();
        let go = Arc::new(Mutex::new(go));
        let port = Port::new(&path);
        let grant = move |wanted: Wanted| {
            begins.send(wanted.urgent).unwrap();
            // Until the test releases it, or has ended.
            let _ = go.lock().unwrap().recv();
            Granted { bytes: wanted.bytes, size: Bytes::mib(64), missing: Bytes::ZERO, why: None }
        };
        port.attend(grant).unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        Guest { stream, let_go, begun, _dir: dir, port }
    }

    impl Guest {
        fn request(&mut self, id: u64, urgent: bool) {
            let why = String::new();
            let request = ToHost::Request { id, bytes: 1 << 20, urgent, timeout_ms: 1000, why };
            self.stream.write_all(&encode(&request).unwrap()).unwrap();
        }

        /// Returns the numbers in the next answers: those granted, and those refused.
        fn answers(&self, count: usize) -> (BTreeSet<u64>, BTreeSet<u64>) {
            let (mut granted, mut refused) = (BTreeSet::new(), BTreeSet::new());
            for line in BufReader::new(&self.stream).lines() {
                let Ok(ToGuest::Answer { id, why, .. }) =
                    serde_json::from_str(line.unwrap().trim())
                else {
                    continue;
                };
                match why {
                    None => granted.insert(id),
                    Some(why) => {
                        assert!(why.contains("already"), "{why}");
                        refused.insert(id)
                    }
                };
                if granted.len() + refused.len() == count {
                    break;
                }
            }
            (granted, refused)
        }
    }

    #[test]
    fn a_guest_that_asks_without_end_gets_no_more_threads() {
        let mut guest = guest();
        let most = MOST_REQUESTS as u64;
        (0..most).for_each(|id| guest.request(id, false));
        (0..most).for_each(|_| assert!(!guest.begun.recv_timeout(DEADLINE).unwrap()));
        (most..most + 100).for_each(|id| guest.request(id, false));
        let (granted, refused) = guest.answers(100);
        assert_eq!((granted, refused), (BTreeSet::new(), (most..most + 100).collect()));
        assert_eq!(guest.port.state().requests, MOST_REQUESTS);
        // A guest that is out of memory is still heard.
        guest.request(5000, true);
        assert!(guest.begun.recv_timeout(DEADLINE).unwrap());
        (0..=most).for_each(|_| guest.let_go.send(()).unwrap());
        let (granted, refused) = guest.answers(MOST_REQUESTS + 1);
        assert_eq!((granted, refused), ((0..most).chain([5000]).collect(), BTreeSet::new()));
    }

    #[test]
    fn answers_without_a_question_are_not_kept() {
        let mut kept = BTreeMap::new();
        (1..=1000).rev().for_each(|id| keep(&mut kept, id, 100, ()));
        assert_eq!(kept.len(), MOST_KEPT);
        keep(&mut kept, u64::MAX, 100, ());
        assert!(kept.is_empty());
    }
}
