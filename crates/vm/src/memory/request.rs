//! The requests of a guest's agent for memory, for itself or for a program in the guest (`GM_lib`
//! of \[Bielski18\], section III-C).

use std::thread;
use std::time::{Duration, Instant};

use aquifer_page::Bytes;

use super::port::{Granted, Wanted};
use super::resize::{Order, Resized};
use super::{VmMemory, lock};
use crate::error::VmError;

/// How often a request that waits for room is retried.
const AGAIN: Duration = Duration::from_millis(200);

/// How long a guest that does not take the requested memory is asked again.
const RETRY: Duration = Duration::from_secs(2);

impl VmMemory {
    /// Listens to the guest while this process lives. `resizing` runs its argument while no other
    /// thread resizes or migrates the VM.
    ///
    /// # Errors
    /// [`VmError::Io`] if no thread can start.
    pub(crate) fn attend(
        &self,
        resizing: impl Fn(&mut dyn FnMut()) + Clone + Send + 'static,
    ) -> Result<(), VmError> {
        let memory = self.clone();
        let grant = move |wanted: Wanted| {
            let granted = memory.grant(&wanted, &resizing);
            let Wanted { bytes, urgent, why, .. } = wanted;
            let asked = Bytes(bytes.unsigned_abs());
            let sign = if bytes < 0 { "-" } else { "+" };
            match &granted.why {
                None => tracing::info!(
                    "the guest asked for {sign}{asked} ({why}; urgent: {urgent}), and has {} now",
                    granted.size
                ),
                Some(not) => tracing::warn!(
                    "the guest asked for {sign}{asked} ({why}; urgent: {urgent}), and lacks {}: \
                     {not}",
                    granted.missing
                ),
            }
            granted
        };
        self.port.attend(grant).map_err(VmError::io("cannot listen to the guest's agent"))
    }

    fn grant(&self, wanted: &Wanted, resizing: &impl Fn(&mut dyn FnMut())) -> Granted {
        let asked = Bytes(wanted.bytes.unsigned_abs());
        let deadline = Instant::now() + wanted.timeout;
        let mut first = None;
        let mut wish = Wish { memory: self, bytes: Bytes::ZERO };
        loop {
            let mut done = Err(VmError::Misuse("the VM is migrating".to_owned()));
            resizing(&mut || {
                done = self.goal(wanted).and_then(|goal| {
                    // Memory that the VM got meanwhile, from any source, counts.
                    let ((from, size), (now, _)) = (*first.get_or_insert(goal), goal);
                    let size = if wanted.bytes > 0 { size.max(now) } else { size.min(now) };
                    let order = Order {
                        size,
                        from: None,
                        exact: false,
                        retry: RETRY,
                        urgent: wanted.urgent,
                        stages: false,
                    };
                    Ok((from, self.resize(&order, &mut |_| true)?))
                });
            });
            match done {
                // The balancer may take some from other VMs meanwhile.
                Err(VmError::NoRoom { .. }) if Instant::now() < deadline => {
                    wish.is(if wanted.urgent { Bytes::ZERO } else { asked });
                    thread::sleep(AGAIN);
                }
                Err(error) => {
                    // The balancer or a command may have resized the VM meanwhile.
                    let size = self.reading().map_or(Bytes::ZERO, |reading| reading.size);
                    let from = first.map_or(size, |(from, _)| from);
                    return granted(wanted.bytes, from, size, Some(error.to_string()));
                }
                Ok((from, Resized { reached, why, .. })) => {
                    let why = why.map(|why| why.to_string());
                    return granted(wanted.bytes, from, reached, why);
                }
            }
        }
    }

    /// Returns the VM's size, and the size that it is to get.
    fn goal(&self, wanted: &Wanted) -> Result<(Bytes, Bytes), VmError> {
        let now = self.reading()?;
        let limits = self.files.limits()?;
        let by = Bytes(wanted.bytes.unsigned_abs());
        let size = if wanted.bytes < 0 {
            now.size.saturating_sub(by).max(now.least).max(limits.min.min(now.size))
        } else if wanted.urgent {
            // The reserve at once, and as much of the rest as is free.
            let (reserve, all) = self.budget.in_need(self.files.name())?;
            let section = self.budget.accounts()?.section;
            let by = by.max(reserve).min(Bytes(all.0 / section.0 * section.0));
            now.size.saturating_add(by).min(now.most).min(limits.max).max(now.size)
        } else {
            now.size.saturating_add(by)
        };
        Ok((now.size, size))
    }
}

/// Returns what became of a request for `wanted` bytes more, or less if negative, by a VM that had
/// `from` and has `size` now.
fn granted(wanted: i64, from: Bytes, size: Bytes, why: Option<String>) -> Granted {
    const SECTIONS: &str = "the host resizes by whole sections, and never shrinks a guest by more \
                            than it asked for";
    let bytes = size.0 as i64 - from.0 as i64;
    let done = if wanted < 0 { from.saturating_sub(size) } else { size.saturating_sub(from) };
    let missing = Bytes(wanted.unsigned_abs()).saturating_sub(done);
    let why = why.or_else(|| (missing > Bytes::ZERO).then(|| SECTIONS.to_owned()));
    Granted { bytes, size, missing, why: why.filter(|_| missing > Bytes::ZERO) }
}

/// The memory that a request waits for. Dropping it withdraws that.
struct Wish<'a> {
    memory: &'a VmMemory,
    bytes: Bytes,
}

impl Wish<'_> {
    fn is(&mut self, bytes: Bytes) {
        let mut all = lock(&self.memory.wish);
        *all = all.saturating_sub(self.bytes) + bytes;
        self.bytes = bytes;
    }
}

impl Drop for Wish<'_> {
    fn drop(&mut self) {
        self.is(Bytes::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_from_any_source_counts_as_granted() {
        let outcome = |wanted: i64, from: u64, size: u64, why: Option<&str>| {
            let (from, size) = (Bytes::mib(from), Bytes::mib(size));
            let granted = granted(wanted << 20, from, size, why.map(str::to_owned));
            (granted.bytes >> 20, granted.missing.0 >> 20, granted.why.is_some())
        };
        assert_eq!(outcome(384, 256, 640, None), (384, 0, false));
        assert_eq!(outcome(384, 512, 768, Some("no room")), (256, 128, true));
        assert_eq!(outcome(384, 512, 512, Some("no room")), (0, 384, true));
        assert_eq!(outcome(384, 512, 384, Some("no room")), (-128, 384, true));
        assert_eq!(outcome(100, 256, 384, None), (128, 0, false));
        assert_eq!(outcome(-200, 512, 384, None), (-128, 72, true));
        // Memory that came just before the last attempt failed.
        assert_eq!(outcome(384, 256, 640, Some("no room")), (384, 0, false));
    }
}
