//! The pauses before a process that died starts again.

use std::time::{Duration, Instant};

/// The pause at first, and at most.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

/// The pause after the latest failure. It doubles until a process lives for a minute.
#[derive(Debug, Default)]
pub(crate) struct Pause(Option<(Duration, Instant)>);

impl Pause {
    /// Begins the pause after a process that lived for so long, and returns it.
    pub(crate) fn begin(&mut self, lived: Duration) -> Duration {
        let pause = match self.0 {
            Some((last, _)) if lived < LONGEST => (last * 2).min(LONGEST),
            _ => FIRST,
        };
        self.0 = Some((pause, Instant::now() + pause));
        pause
    }

    /// Begins a pause after an end that is no failure.
    pub(crate) fn hold(&mut self, pause: Duration) {
        self.0 = Some((FIRST, Instant::now() + pause));
    }

    /// Returns whether the pause is over.
    pub(crate) fn is_over(&self) -> bool {
        self.0.is_none_or(|(_, until)| Instant::now() >= until)
    }

    /// Forgets earlier failures.
    pub(crate) fn forget(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_until_a_process_lives() {
        let mut pause = Pause::default();
        assert!(pause.is_over());
        let pauses: Vec<_> = (0..8).map(|_| pause.begin(Duration::ZERO).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert!(!pause.is_over());
        assert_eq!(pause.begin(LONGEST), FIRST);
    }
}
