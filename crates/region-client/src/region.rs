//! Regions for programs that use regions explicitly, and the paths of a region's engine.

use std::fs::OpenOptions;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, AtomicU64};

use aquifer_page::PAGE_SIZE;

use crate::client::{AdoptError, Mapping};
use crate::message::Run;
use crate::sys::FileMap;

/// The name of an engine's socket.
const PROGRAMS: &str = "programs";

/// Returns the path of the socket on which the engine of the region in this file listens. Returns
/// `None` if the path has no parent or no UTF-8 file name.
pub fn socket_of(region: &Path) -> Option<PathBuf> {
    let name = region.file_name()?.to_str()?;
    Some(region.parent()?.join(format!(".{name}")).join(PROGRAMS))
}

/// Returns the path of a second name for the region's file that stands for its bytes from `offset`
/// on. Programs that map files only from their beginning use it. The caller must create the name,
/// as a hard link.
pub fn window(region: &Path, offset: u64) -> Option<PathBuf> {
    Some(socket_of(region)?.with_file_name(format!("{WINDOW}{offset}")))
}

/// The prefix of the names of windows; the offset in bytes follows.
const WINDOW: &str = "from-";

/// The region behind an open file, derived from the path that opened the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// The socket of the region's engine.
    pub socket: PathBuf,
    /// The offset of the file's first byte in the region, in bytes.
    pub offset: u64,
}

impl Opened {
    /// Returns the region and offset of a path, or `None` if the path is neither a region nor a
    /// window.
    pub fn of(path: &Path) -> Option<Self> {
        let offset =
            path.file_name()?.to_str()?.strip_prefix(WINDOW).and_then(|offset| offset.parse().ok());
        let is_window = offset.map(|offset| Self { socket: path.with_file_name(PROGRAMS), offset });
        let is = [is_window, socket_of(path).map(|socket| Self { socket, offset: 0 })];
        is.into_iter().flatten().find(|opened| opened.socket.exists())
    }
}

/// A whole region in the memory of this process. Children that the process forks do not inherit the
/// mapping.
///
/// The kernel refuses `MADV_REMOVE` on the mapping (`EINVAL`), as that would remove only the pages
/// in the file and leave the volume's. [`Region::discard`] removes both.
///
/// ```no_run
/// use std::path::Path;
/// use std::sync::atomic::Ordering;
///
/// let region = aquifer_region_client::Region::map(Path::new("/run/aquifer/regions/cache"))?;
/// region.words()[0].store(1, Ordering::Relaxed);
/// # Ok::<(), aquifer_region_client::AdoptError>(())
/// ```
#[derive(Debug)]
pub struct Region {
    /// Mapped until `Region` is dropped.
    memory: ManuallyDrop<FileMap>,
    mapping: Mapping,
}

impl Region {
    /// Maps the region in this file.
    ///
    /// # Errors
    /// [`AdoptError`]: the file cannot be opened or mapped, or the engine does not adopt the
    /// mapping.
    pub fn map(path: &Path) -> Result<Self, AdoptError> {
        let system = |what| move |source| AdoptError::System { what, source };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(system("cannot open the region"))?;
        let metadata = file.metadata().map_err(system("cannot read the region's size"))?;
        let length = metadata.len() as usize;
        let memory = FileMap::closed(&file, length).map_err(system("cannot map the region"))?;
        let socket = socket_of(path)
            .ok_or(io::ErrorKind::InvalidInput.into())
            .map_err(system("the file is not a region"))?;
        // SAFETY: this is a shared mapping of the whole file, and no other code has its address
        // yet.
        let mapping = unsafe { Mapping::adopt(memory.address(), length, 0, &socket, true) }?;
        let region = Self { memory: ManuallyDrop::new(memory), mapping };
        region.memory.open_up().map_err(system("cannot make the mapping accessible"))?;
        Ok(region)
    }

    /// Returns the region's bytes. They are atomic because other processes may have the region
    /// mapped.
    pub fn bytes(&self) -> &[AtomicU8] {
        self.memory.bytes()
    }

    /// Returns the region as 64-bit words, which are atomic for the same reason as its bytes.
    pub fn words(&self) -> &[AtomicU64] {
        self.memory.words()
    }

    /// Makes whole pages read as zeroes, and frees their memory here and at the lenders. `pages`
    /// are page numbers.
    ///
    /// # Errors
    /// The engine refuses, because the pages are not all in the region or the region is being
    /// handed over.
    pub fn discard(&self, pages: Range<u64>) -> io::Result<()> {
        self.mapping
            .discard(Run { first: pages.start, count: pages.end.saturating_sub(pages.start) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // A child of the process does not have the mapping, and may have another one at its
        // addresses.
        if !self.mapping.is_mine() {
            return;
        }
        let all = self.memory.address()..self.memory.address() + self.memory.bytes().len();
        let unmapped = self.mapping.release(&all, || {
            // SAFETY: nothing uses the memory after this, as its only owner is being dropped.
            unsafe { ManuallyDrop::drop(&mut self.memory) };
            Ok(())
        });
        debug_assert!(unmapped.is_ok(), "it does not fail");
    }
}

const _: () = assert!(PAGE_SIZE.is_multiple_of(size_of::<u64>()));

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

    use std::fs;

    use super::*;

    #[test]
    fn a_window_is_the_region_from_its_offset_on() {
        let dir = tempfile::tempdir().unwrap();
        let region = dir.path().join("db");
        let socket = socket_of(&region).unwrap();
        assert_eq!(Opened::of(&region), None);
        fs::create_dir(socket.parent().unwrap()).unwrap();
        fs::write(&socket, "").unwrap();
        assert_eq!(Opened::of(&region), Some(Opened { socket: socket.clone(), offset: 0 }));
        let window = window(&region, 512 << 20).unwrap();
        assert_eq!(Opened::of(&window), Some(Opened { socket, offset: 512 << 20 }));
        assert_eq!(Opened::of(&dir.path().join("from-4096")), None);
    }
}
