//! Events outside the controller's decisions: each is a line in the log and a row of `aquifer
//! status`.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use aquifer_api::status::{Event, EventKind};
use aquifer_page::lock;

/// How many events stay in memory.
const KEPT: usize = 200;

/// The latest events, in memory only; the log keeps them longer.
#[derive(Clone, Debug, Default)]
pub struct Events(Arc<Mutex<VecDeque<Event>>>);

impl Events {
    /// Logs an event and keeps it.
    pub fn note(&self, kind: EventKind, who: impl ToString, what: impl Into<String>) {
        let (who, what) = (who.to_string(), what.into());
        match kind {
            EventKind::LenderBack
            | EventKind::SpillBack
            | EventKind::VmEnded
            | EventKind::HostUp
            | EventKind::Drain => {
                tracing::info!(event = %kind, who, "{what}");
            }
            _ => tracing::warn!(event = %kind, who, "{what}"),
        }
        let mut events = lock(&self.0);
        if events.len() == KEPT {
            events.pop_front();
        }
        events.push_back(Event { at: now(), kind, who, what });
    }

    /// Returns the kept events, oldest first.
    pub fn all(&self) -> Vec<Event> {
        lock(&self.0).iter().cloned().collect()
    }
}

/// Returns the time in seconds since the Unix epoch.
pub(crate) fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_latest_events_are_kept() {
        let events = Events::default();
        for number in 0..=KEPT {
            events.note(EventKind::VmEnded, number, "it ended");
        }
        let all = events.all();
        assert_eq!((all.len(), all[0].who.as_str()), (KEPT, "1"));
    }
}
