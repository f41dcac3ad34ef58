//! The thread that locks the pages of recovered leases in RAM while the store serves them.

use std::io;
use std::sync::{Arc, Weak};
use std::thread;

use crate::ram::RamLock;
use crate::span::CHUNK_PAGES;
use crate::sys::{LeasePages as _, PrivatePages};

/// Maps all stored pages on a thread of its own: the kernel locks a page in RAM when it is mapped.
/// It must first read a page that it swapped out, perhaps from slow swap, or from swap that waits
/// for this very lender.
pub(super) fn start(recovered: Vec<Weak<PrivatePages>>, ram: Arc<RamLock>) {
    if recovered.is_empty() {
        return;
    }
    let note = Arc::clone(&ram);
    let work = move || recovered.iter().for_each(|pages| note.note(map(pages)));
    ram.note(thread::Builder::new().name("store-lock".to_owned()).spawn(work).map(drop));
}

/// Continues until all pages are mapped or the lease is gone.
fn map(pages: &Weak<PrivatePages>) -> io::Result<()> {
    let mut at = 0;
    while let Some(private) = pages.upgrade()
        && let Some(start) = private.first_not_idle(at..private.pages())
    {
        at = private.pages().min(start + CHUNK_PAGES);
        private.map_stored(start..at)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::time::{Duration, Instant};

    use aquifer_page::{Bytes, PAGE_SIZE};

    use crate::{LeaseRecord, Store};

    const PAGES: u64 = 1000;
    const PAGE: u64 = PAGE_SIZE as u64;

    /// Returns how much of a file this process has mapped.
    fn mapped(file: &str) -> Bytes {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let of_file = smaps.lines().skip_while(|line| !line.ends_with(file));
        let rss = of_file.skip(1).find_map(|line| line.strip_prefix("Rss:")).unwrap();
        Bytes::kib(rss.trim().trim_end_matches(" kB").parse().unwrap())
    }

    #[test]
    fn a_store_serves_before_it_has_mapped_what_it_found() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let store = Store::open(dir.path()).unwrap();
        let record = LeaseRecord::new("b".parse().unwrap(), Bytes(4 * PAGES * PAGE));
        let lease = store.create(record).unwrap();
        let file = format!("{}.pages", lease.id());
        // Every other page of the second and of the last quarter.
        let stored: Vec<_> = (PAGES..2 * PAGES).chain(3 * PAGES..4 * PAGES).step_by(2).collect();
        stored.iter().for_each(|page| lease.write(page * PAGE, &[1; PAGE_SIZE]).unwrap());
        let id = lease.id();
        drop((store, lease));

        let (store, recovered) = Store::recovered(dir.path()).unwrap();
        let lease = store.get(id).unwrap();
        assert_eq!(mapped(&file), Bytes::ZERO);
        assert_eq!(lease.stored(), Bytes(PAGES * PAGE));
        lease.discard(stored[0] * PAGE, PAGE).unwrap();
        super::start(recovered, store.ram.clone());
        let all = Bytes((PAGES - 1) * PAGE);
        let deadline = Instant::now() + Duration::from_secs(120);
        while mapped(&file) != all {
            assert!(Instant::now() < deadline, "{} of {all} are mapped", mapped(&file));
            std::thread::sleep(Duration::from_millis(5));
        }
        // The thread allocated no other page.
        let path = dir.path().join(file);
        assert_eq!(
            Bytes(std::os::unix::fs::MetadataExt::blocks(&path.metadata().unwrap()) * 512),
            all
        );
    }
}
