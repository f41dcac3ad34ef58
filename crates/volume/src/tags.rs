//! The tags of a lease's pages: what each page must be when its lender returns it.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use aquifer_page::{Bytes, PAGE_SIZE, is_zero};
use aquifer_transport::sleep::going_to_sleep;
use twox_hash::XxHash3_64;

use crate::holder::Wrong;

/// Memory for tags, one word a page. A ledger can keep it beyond the process.
pub type TagMemory = Arc<dyn AsRef<[AtomicU64]> + Send + Sync>;

/// The tag of a page of zeroes, and of a page that was never written.
pub(crate) const OF_ZEROES: u64 = 0;
/// The last write of the page failed, or its process died: the lender may have any version.
pub(crate) const UNKNOWN: u64 = u64::MAX - 1;
/// A write of the page is under way.
const WRITING: u64 = u64::MAX;

/// How long a write waits before it looks again whether another write of the same page is done.
const WAIT: Duration = Duration::from_micros(50);

/// Makes a page's tag of a number that depends on all of the page, by a change of the numbers that
/// mean something else.
pub(crate) fn tag_of(number: u64) -> u64 {
    if number == OF_ZEROES || number >= UNKNOWN { 1 } else { number }
}

/// Returns the tag of a page that is not encrypted: a checksum, which finds errors and no
/// forgeries.
pub(crate) fn checksum(page: &[u8]) -> u64 {
    if is_zero(page) { OF_ZEROES } else { tag_of(XxHash3_64::oneshot(page)) }
}

/// A tag for each page of a lease, of 8 bytes: 2 MiB for a GiB.
///
/// A write [claims](Self::claim) its pages first, so that writes of one page take turns. It sets
/// the tags when the lender has acknowledged the new version. A read compares tags after the
/// lender's answer. If a tag differs, a write may have ended meanwhile: only a second read, with no
/// write under way, proves that the lender is wrong.
pub(crate) struct Tags {
    words: TagMemory,
    /// For a copy that lags behind: the tags of what has arrived there, for the next process.
    arrived: Option<TagMemory>,
}

impl fmt::Debug for Tags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tags").field(&self.words().len()).finish()
    }
}

impl Tags {
    /// Makes tags that end with this process, for so many pages of zeroes.
    pub(crate) fn new(pages: u64) -> Self {
        // Not zero at first, so that the kernel provides the memory now.
        let words: Box<[AtomicU64]> = (0..pages).map(|_| AtomicU64::new(UNKNOWN)).collect();
        words.iter().for_each(|word| word.store(OF_ZEROES, Ordering::Relaxed));
        Self { words: Arc::new(words), arrived: None }
    }

    /// Takes over the tags of an earlier process. Writes that were under way then have failed.
    pub(crate) fn over(memory: TagMemory) -> Self {
        let tags = Self { words: memory, arrived: None };
        let writing = tags.words().iter().filter(|word| word.load(Ordering::Relaxed) == WRITING);
        writing.for_each(|word| word.store(UNKNOWN, Ordering::Relaxed));
        tags
    }

    /// Makes tags for a copy that lags behind. The memory says what an earlier process knew to have
    /// arrived there. From then on, [`arrive`](Self::arrive) says what has.
    pub(crate) fn lagging(memory: TagMemory) -> Self {
        let arrived = Self::over(memory).words;
        let known = (*arrived).as_ref().iter().map(|word| word.load(Ordering::Relaxed));
        let words: Box<[AtomicU64]> = known.map(AtomicU64::new).collect();
        Self { words: Arc::new(words), arrived: Some(arrived) }
    }

    fn words(&self) -> &[AtomicU64] {
        (*self.words).as_ref()
    }

    fn arrived(&self, page: u64) -> Option<&AtomicU64> {
        self.arrived.as_ref().map(|memory| &(**memory).as_ref()[page as usize])
    }

    /// Records that the page has changed, and that the change has yet to arrive.
    pub(crate) fn depart(&self, page: u64) {
        self.arrived(page).into_iter().for_each(|word| word.store(UNKNOWN, Ordering::SeqCst));
    }

    /// Records that the version of the page with this tag has arrived. The caller makes sure that
    /// no page [departs](Self::depart) meanwhile, except one that is forgotten.
    pub(crate) fn arrive(&self, page: u64, tag: u64) {
        let Some(arrived) = self.arrived(page) else { return };
        arrived.store(tag, Ordering::SeqCst);
        // Another thread may forget the page now: in both, whichever comes last. A write under way
        // is that of this version, or departs later.
        let known = self.word(page).load(Ordering::SeqCst);
        if known != tag && known != WRITING {
            arrived.store(UNKNOWN, Ordering::SeqCst);
        }
    }

    /// Returns whether zeroes are known to have arrived.
    pub(crate) fn has_arrived_as_zeroes(&self, page: u64) -> bool {
        self.arrived(page).is_some_and(|word| word.load(Ordering::SeqCst) == OF_ZEROES)
    }

    fn word(&self, page: u64) -> &AtomicU64 {
        &self.words()[page as usize]
    }

    /// Compares the tag of a page that the lender returned.
    pub(crate) fn check(&self, page: u64, found: u64) -> Result<(), Wrong> {
        Self::compare(self.word(page).load(Ordering::Acquire), found)
    }

    /// Compares the tag that a page must have with the one that it has.
    pub(crate) fn compare(known: u64, found: u64) -> Result<(), Wrong> {
        match known {
            _ if known == found => Ok(()),
            WRITING | UNKNOWN => Err(Wrong::Unknown),
            _ if found == OF_ZEROES => Err(Wrong::Zeroes),
            _ => Err(Wrong::Other),
        }
    }

    /// Claims a page for a write, after other writes of it. Returns its tag.
    fn take(&self, page: u64) -> u64 {
        let word = self.word(page);
        loop {
            let known = word.load(Ordering::Relaxed);
            if known == WRITING {
                going_to_sleep();
                thread::sleep(WAIT);
                continue;
            }
            let taken = word.compare_exchange(known, WRITING, Ordering::Acquire, Ordering::Relaxed);
            if taken.is_ok() {
                return known;
            }
        }
    }

    fn set(&self, page: u64, tag: u64) {
        self.word(page).store(tag, Ordering::Release);
    }

    /// Claims a run of pages for a write. Callers that claim several runs MUST claim them in
    /// ascending order.
    pub(crate) fn claim(&self, pages: Range<u64>) -> Claim<'_> {
        pages.clone().for_each(|page| {
            self.take(page);
        });
        Claim { tags: self, pages }
    }

    /// Claims a page of which only a part changes. Returns the page's tag before.
    pub(crate) fn claim_part(&self, page: u64) -> (Claim<'_>, u64) {
        let before = self.take(page);
        (Claim { tags: self, pages: page..page + 1 }, before)
    }

    /// Returns whether it is not known which version of the page the lender has.
    pub(crate) fn is_unknown(&self, page: u64) -> bool {
        self.word(page).load(Ordering::Acquire) >= UNKNOWN
    }

    /// Returns whether the last write of the page failed, and no other is under way.
    pub(crate) fn is_lacking(&self, page: u64) -> bool {
        self.word(page).load(Ordering::Acquire) == UNKNOWN
    }

    /// Records that it is not known which version of the page the lender has.
    pub(crate) fn forget(&self, page: u64) {
        self.word(page).store(UNKNOWN, Ordering::SeqCst);
        self.depart(page);
    }

    /// Records that no page's version is known.
    pub(crate) fn forget_all(&self) {
        (0..self.words().len() as u64).for_each(|page| self.forget(page));
    }

    /// Returns whether the page is known to be zeroes.
    pub(crate) fn is_of_zeroes(&self, page: u64) -> bool {
        self.word(page).load(Ordering::Acquire) == OF_ZEROES
    }

    /// Returns how much is known to be stored, and is not zeroes.
    pub(crate) fn stored(&self) -> Bytes {
        let is_data =
            |word: &&AtomicU64| !matches!(word.load(Ordering::Relaxed), OF_ZEROES | UNKNOWN);
        Bytes(self.words().iter().filter(is_data).count() as u64 * PAGE_SIZE as u64)
    }

    /// Returns the tags of these pages, for another host.
    pub(crate) fn of(&self, pages: Range<u64>) -> Vec<u64> {
        pages.map(|page| self.word(page).load(Ordering::Acquire).min(UNKNOWN)).collect()
    }

    /// Sets tags from this page on to those that another host had.
    pub(crate) fn put(&self, first: u64, tags: &[u64]) {
        (first..).zip(tags).for_each(|(page, tag)| self.set(page, (*tag).min(UNKNOWN)));
    }
}

/// Claimed pages. If a write ends without [`done`](Self::done), their versions are unknown.
pub(crate) struct Claim<'a> {
    tags: &'a Tags,
    pages: Range<u64>,
}

impl Claim<'_> {
    /// Sets the pages' tags after an acknowledged write.
    pub(crate) fn done(mut self, mut tag: impl FnMut(u64) -> u64) {
        for page in std::mem::take(&mut self.pages) {
            self.tags.set(page, tag(page));
        }
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.pages.clone().for_each(|page| self.tags.forget(page));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_version_written_last_passes() {
        let tags = Tags::new(4);
        assert_eq!(tags.check(1, OF_ZEROES), Ok(()));
        assert_eq!(tags.check(1, 7), Err(Wrong::Other));
        tags.claim(1..3).done(|page| page + 6);
        assert_eq!(tags.check(1, 7), Ok(()));
        assert_eq!(tags.check(2, 7), Err(Wrong::Other));
        assert_eq!(tags.check(2, OF_ZEROES), Err(Wrong::Zeroes));
    }

    #[test]
    fn after_a_failed_write_nothing_passes_until_the_next_one() {
        let tags = Tags::new(1);
        drop(tags.claim(0..1));
        assert!(tags.is_unknown(0));
        for found in [OF_ZEROES, 5, UNKNOWN - 1] {
            assert_eq!(tags.check(0, found), Err(Wrong::Unknown));
        }
        tags.claim(0..1).done(|_| 5);
        assert_eq!(tags.check(0, 5), Ok(()));
    }

    #[test]
    fn an_interrupted_write_has_failed_for_the_next_process() {
        let memory: TagMemory = Arc::new([AtomicU64::new(WRITING), AtomicU64::new(9)]);
        let tags = Tags::over(memory);
        assert_eq!((tags.check(0, 9), tags.check(1, 9)), (Err(Wrong::Unknown), Ok(())));
        assert_eq!(tags.of(0..2), [UNKNOWN, 9]);
    }

    #[test]
    fn the_next_process_believes_only_what_has_arrived() {
        let memory: TagMemory = Arc::new([const { AtomicU64::new(OF_ZEROES) }; 3]);
        let tags = Tags::lagging(memory.clone());
        tags.claim(0..3).done(|page| page + 5);
        (0..3).for_each(|page| tags.depart(page));
        (0..2).for_each(|page| tags.arrive(page, page + 5));
        tags.forget(1);
        assert_eq!(tags.of(0..3), [5, UNKNOWN, 7]);
        assert_eq!(Tags::lagging(memory.clone()).of(0..3), [5, UNKNOWN, UNKNOWN]);
        tags.arrive(1, 6);
        assert_eq!(Tags::lagging(memory.clone()).of(1..2), [UNKNOWN], "it was forgotten");
        let claim = tags.claim(2..3);
        tags.arrive(2, OF_ZEROES);
        claim.done(|_| OF_ZEROES);
        assert!(tags.has_arrived_as_zeroes(2));
        assert_eq!(Tags::lagging(memory).of(0..3), [5, UNKNOWN, OF_ZEROES]);
    }

    #[test]
    fn writes_of_one_page_take_turns() {
        let tags = Tags::new(1);
        let first = tags.claim(0..1);
        thread::scope(|threads| {
            let second = threads.spawn(|| tags.claim_part(0).1);
            thread::sleep(Duration::from_millis(5));
            first.done(|_| 8);
            assert_eq!(second.join().ok(), Some(8));
        });
        assert!(tags.is_unknown(0));
    }

    #[test]
    fn no_tag_of_data_means_something_else() {
        for number in [0, u64::MAX, u64::MAX - 1] {
            assert_eq!(tag_of(number), 1);
        }
        assert_eq!(checksum(&[0; PAGE_SIZE]), OF_ZEROES);
        assert_ne!(checksum(&[1; PAGE_SIZE]), checksum(&[2; PAGE_SIZE]));
    }
}
