//! The observer of a run's lenders: while the command runs, it reports events on standard error.

mod news;

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use aquifer_blockdev::process::{ProcessError, client};
use aquifer_page::VolumeId;

use self::news::{Message, News};

/// The time between two looks at the volume.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// How often the last look is tried if the volume's process does not answer in time.
const LAST_LOOKS: u32 = 3;

/// The place of a volume's process.
#[derive(Debug, Clone)]
pub struct Place {
    /// The directory of its files.
    pub state: PathBuf,
    /// The volume.
    pub volume: VolumeId,
}

/// The thread that watches a volume.
#[derive(Debug)]
pub struct Watch {
    _stop: Sender<()>,
    thread: JoinHandle<News>,
}

impl Watch {
    /// Starts to watch a volume. Each message is a line of text, or of JSON.
    ///
    /// # Errors
    /// If the kernel refuses a thread.
    pub fn start(place: Place, json: bool) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new().name("watch".to_owned()).spawn(move || {
            let mut news = News::default();
            while stopped.recv_timeout(POLL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                look(&place, &mut news, json);
            }
            let _ = (0..LAST_LOOKS).find(|_| look(&place, &mut news, json));
            news
        })?;
        Ok(Self { _stop: stop, thread })
    }

    /// Looks once more and ends the thread; returns whether pages were lost.
    pub fn end(self) -> bool {
        let Self { _stop: stop, thread } = self;
        drop(stop);
        thread.join().is_ok_and(|news| news.has_lost_pages())
    }
}

/// Reports the news; returns false if the volume's process did not answer in time.
fn look(place: &Place, news: &mut News, json: bool) -> bool {
    let messages = match client::status(&place.state, place.volume) {
        Ok(status) => news.of(&status.volume),
        // A volume that was detached in order leaves no record.
        Err(ProcessError::NotServed(_)) => {
            let is_dead = client::record(&place.state, place.volume).is_ok()
                && !client::is_alive(&place.state, place.volume);
            if is_dead { news.of_dead() } else { Vec::new() }
        }
        Err(_) => return false,
    };
    messages.iter().for_each(|message| report(message, json));
    true
}

fn report(message: &Message, json: bool) {
    if json {
        eprintln!("{}", serde_json::json!({ "event": message }));
    } else {
        eprintln!("aquifer: {message}");
    }
}
