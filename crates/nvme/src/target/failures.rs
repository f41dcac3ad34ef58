//! Record of hosts that failed to authenticate, and of the pause before their next attempt.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Failures in a row before a host must pause: all queues of a controller may well fail once.
const FREE: u32 = 16;
/// The first pause; each further failure doubles it.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Time without a failure after which the record of a host is cleared.
const MEMORY: Duration = Duration::from_secs(600);
/// The most hosts recorded.
const MAX_HOSTS: usize = 1024;

/// The failures of each host address.
#[derive(Debug, Default)]
pub(super) struct Failures(BTreeMap<IpAddr, Record>);

#[derive(Clone, Copy, Debug)]
struct Record {
    in_a_row: u32,
    last: Instant,
}

impl Record {
    fn pause(self) -> Duration {
        let Some(doublings) = self.in_a_row.checked_sub(FREE) else { return Duration::ZERO };
        FIRST_PAUSE.saturating_mul(1 << doublings.min(16)).min(LONGEST_PAUSE)
    }
}

impl Failures {
    /// Returns whether the host must still pause.
    pub(super) fn must_pause(&self, host: IpAddr, now: Instant) -> bool {
        self.0.get(&host).is_some_and(|record| now < record.last + record.pause())
    }

    /// Records a failure in an attempt that the host was allowed to make.
    pub(super) fn failed(&mut self, host: IpAddr, now: Instant) {
        self.0.retain(|_, record| now < record.last + MEMORY);
        if self.0.len() >= MAX_HOSTS && !self.0.contains_key(&host) {
            let oldest = self.0.iter().min_by_key(|(_, record)| record.last).map(|(&host, _)| host);
            oldest.map(|oldest| self.0.remove(&oldest));
        }
        let record = self.0.entry(host).or_insert(Record { in_a_row: 0, last: now });
        *record = Record { in_a_row: record.in_a_row.saturating_add(1), last: now };
    }

    /// Clears the record of a host that has authenticated.
    pub(super) fn succeeded(&mut self, host: IpAddr) {
        self.0.remove(&host);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1));
    const OTHER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 2));

    fn after(failures: u32, now: Instant) -> Failures {
        let mut book = Failures::default();
        (0..failures).for_each(|_| book.failed(HOST, now));
        book
    }

    #[test]
    fn a_host_that_fails_again_and_again_must_pause_ever_longer() {
        let now = Instant::now();
        assert!(!after(FREE - 1, now).must_pause(HOST, now));
        let book = after(FREE, now);
        assert!(book.must_pause(HOST, now) && !book.must_pause(OTHER, now));
        assert!(!book.must_pause(HOST, now + FIRST_PAUSE));
        let book = after(FREE + 1, now);
        assert!(book.must_pause(HOST, now + FIRST_PAUSE));
        assert!(!book.must_pause(HOST, now + 2 * FIRST_PAUSE));
        let book = after(10_000, now);
        assert!(book.must_pause(HOST, now + LONGEST_PAUSE - FIRST_PAUSE));
        assert!(!book.must_pause(HOST, now + LONGEST_PAUSE));
    }

    #[test]
    fn success_and_time_clean_the_record() {
        let now = Instant::now();
        let mut book = after(FREE, now);
        book.succeeded(HOST);
        assert!(!book.must_pause(HOST, now));
        let mut book = after(FREE, now);
        book.failed(HOST, now + MEMORY);
        assert!(!book.must_pause(HOST, now + MEMORY));
    }

    #[test]
    fn no_more_hosts_are_remembered_than_there_is_room_for() {
        let now = Instant::now();
        let mut book = after(FREE, now);
        for number in 1..=MAX_HOSTS as u32 {
            book.failed(IpAddr::from(number.to_be_bytes()), now + Duration::from_millis(1));
        }
        assert_eq!(book.0.len(), MAX_HOSTS);
        assert!(!book.must_pause(HOST, now));
    }
}
