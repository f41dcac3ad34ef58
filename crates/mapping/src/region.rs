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

/// Where the engine of the region in this file listens.
pub fn socket_of(region: &Path) -> Option<PathBuf> {
    let name = region.file_name()?.to_str()?;
    Some(region.parent()?.join(format!(".{name}")).join("programs"))
}

/// A whole region, in the memory of this process.
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
        let file =
            OpenOptions::new().read(true).write(true).open(path).map_err(system("cannot open the region"))?;
        let length = file.metadata().map_err(system("cannot look at the region"))?.len() as usize;
        let memory = FileMap::new(&file, length).map_err(system("cannot map the region"))?;
        let socket =
            socket_of(path).ok_or(io::ErrorKind::InvalidInput.into()).map_err(system("this is no region"))?;
        // SAFETY: it is a shared mapping of all of the file, and nobody else has it yet.
        let mapping = unsafe { Mapping::adopt(memory.address(), length, 0, &socket) }?;
        Ok(Self { memory: ManuallyDrop::new(memory), mapping })
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
        self.mapping.discard(Run { first: pages.start, count: pages.end.saturating_sub(pages.start) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let all = self.memory.address()..self.memory.address() + self.memory.bytes().len();
        // SAFETY: nobody uses it after this, as this is the end of what holds it.
        self.mapping.release(&all, || unsafe { ManuallyDrop::drop(&mut self.memory) });
    }
}

const _: () = assert!(PAGE_SIZE.is_multiple_of(size_of::<u64>()));
