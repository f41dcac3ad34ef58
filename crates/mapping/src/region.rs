//! A region for programs that know of regions.

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

/// Where the engine of the region in this file listens.
pub fn socket_of(region: &Path) -> Option<PathBuf> {
    let name = region.file_name()?.to_str()?;
    Some(region.parent()?.join(format!(".{name}")).join(PROGRAMS))
}

/// A name for the region in this file of which its bytes from `offset` on are the first: for programs that map files from their beginning only. It
/// has to be made, as a hard link.
pub fn window(region: &Path, offset: u64) -> Option<PathBuf> {
    Some(socket_of(region)?.with_file_name(format!("{WINDOW}{offset}")))
}

/// What the names of windows begin with.
const WINDOW: &str = "from-";

/// The region that an open file is, by the path that it was opened by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Where its engine listens.
    pub socket: PathBuf,
    /// What the file's first byte is in the region.
    pub offset: u64,
}

impl Opened {
    /// None where the path is no region's and no window's.
    pub fn of(path: &Path) -> Option<Self> {
        let offset =
            path.file_name()?.to_str()?.strip_prefix(WINDOW).and_then(|offset| offset.parse().ok());
        let is_window = offset.map(|offset| Self { socket: path.with_file_name(PROGRAMS), offset });
        let is = [is_window, socket_of(path).map(|socket| Self { socket, offset: 0 })];
        is.into_iter().flatten().find(|opened| opened.socket.exists())
    }
}

/// A whole region, in the memory of this process, and not in that of children that it forks. The kernel refuses `MADV_REMOVE` there
/// (`EINVAL`), as it would take out only what is here: [`Region::discard`] does it.
///
/// ```no_run
/// use std::path::Path;
/// use std::sync::atomic::Ordering;
///
/// let region = aquifer_mapping::Region::map(Path::new("/run/aquifer/regions/cache"))?;
/// region.words()[0].store(1, Ordering::Relaxed);
/// # Ok::<(), aquifer_mapping::AdoptError>(())
/// ```
#[derive(Debug)]
pub struct Region {
    /// There until this is dropped.
    memory: ManuallyDrop<FileMap>,
    mapping: Mapping,
}

impl Region {
    /// Maps the region in this file.
    ///
    /// # Errors
    /// [`AdoptError`].
    pub fn map(path: &Path) -> Result<Self, AdoptError> {
        let system = |what| move |source| AdoptError::System { what, source };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(system("cannot open the region"))?;
        let length = file.metadata().map_err(system("cannot look at the region"))?.len() as usize;
        let memory = FileMap::closed(&file, length).map_err(system("cannot map the region"))?;
        let socket = socket_of(path)
            .ok_or(io::ErrorKind::InvalidInput.into())
            .map_err(system("this is no region"))?;
        // SAFETY: it is a shared mapping of all of the file, and nobody else has it yet.
        let mapping = unsafe { Mapping::adopt(memory.address(), length, 0, &socket, true) }?;
        let region = Self { memory: ManuallyDrop::new(memory), mapping };
        region.memory.open_up().map_err(system("cannot make the mapping accessible"))?;
        Ok(region)
    }

    /// Its bytes. They are atomic because others may have the region mapped, too.
    pub fn bytes(&self) -> &[AtomicU8] {
        self.memory.bytes()
    }

    /// The same by words of 64 bits.
    pub fn words(&self) -> &[AtomicU64] {
        self.memory.words()
    }

    /// Makes whole pages read as zeroes, and gives back what they took.
    ///
    /// # Errors
    /// Where they are not in the region.
    pub fn discard(&self, pages: Range<u64>) -> io::Result<()> {
        self.mapping
            .discard(Run { first: pages.start, count: pages.end.saturating_sub(pages.start) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // A child of the process does not have it, and may have something else there.
        if !self.mapping.is_mine() {
            return;
        }
        let all = self.memory.address()..self.memory.address() + self.memory.bytes().len();
        let unmapped = self.mapping.release(&all, || {
            // SAFETY: nobody uses it after this, as this is the end of what holds it.
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
