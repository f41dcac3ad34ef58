//! Regions for programs in C, as `include/aquifer.h` declares and documents them. They include the
//! five calls of the library in \[Jo20\], section 4.2.

#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr;

use aquifer_page::Bytes;
use aquifer_region::process::{Files, client};
use aquifer_region_client::{Region as Mapped, Run};

/// `struct aquifer_region`.
#[derive(Debug)]
pub struct Region {
    files: Files,
    mapped: Option<Mapped>,
}

/// `struct aquifer_metadata`.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "the header has them")]
pub struct Metadata {
    pub size: u64,
    pub cache: u64,
    pub resident: u64,
    pub dirty: u64,
    pub remote: u64,
    pub zero: u64,
    pub zero_faults: u64,
    pub remote_faults: u64,
    pub waiting: u64,
    pub extents: u64,
}

/// `struct aquifer_extent`.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "the header has them")]
pub struct Extent {
    pub from: u64,
    pub at: u64,
    pub lease: [u8; 16],
    pub address: [u8; 256],
}

type Result<T> = std::result::Result<T, String>;

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Turns a result into 0 or -1, and keeps the reason for [`aquifer_error`].
fn answer(done: Result<()>) -> c_int {
    done.map_or_else(
        |error| {
            fail(&error);
            -1
        },
        |()| 0,
    )
}

fn fail(error: &str) {
    let error = CString::new(error.replace('\0', " ")).unwrap_or_default();
    ERROR.with_borrow_mut(|last| *last = error);
}

fn open(file: &CStr, map: bool) -> Result<Region> {
    let path = Path::new(OsStr::from_bytes(file.to_bytes()));
    let name = path.file_name().and_then(OsStr::to_str).and_then(|name| name.parse().ok());
    let (Some(directory), Some(name)) = (path.parent(), name) else {
        return Err(format!(
            "{} is not a region's file; a region's file is RUN_DIR/regions/NAME",
            path.display()
        ));
    };
    let files = Files::new(directory, &name);
    client::record(&files).map_err(text)?;
    let mapped = if map { Some(Mapped::map(path).map_err(text)?) } else { None };
    Ok(Region { files, mapped })
}

fn handle(opened: Result<Region>) -> *mut Region {
    match opened {
        Ok(region) => Box::into_raw(Box::new(region)),
        Err(error) => {
            fail(&error);
            ptr::null_mut()
        }
    }
}

impl Region {
    fn metadata(&self) -> Result<Metadata> {
        let status = client::status(&self.files).map_err(text)?;
        let extents = client::extents(&self.files).map_err(text)?.len() as u64;
        let (usage, counts) = (status.usage, status.counts);
        Ok(Metadata {
            size: usage.size.0,
            cache: usage.cache.0,
            resident: usage.resident.0,
            dirty: usage.dirty.0,
            remote: usage.remote.0,
            zero: usage.zero.0,
            zero_faults: counts.zero_faults,
            remote_faults: counts.remote_faults,
            waiting: status.waiting,
            extents,
        })
    }

    fn extent(&self, index: u64) -> Result<Extent> {
        let all = client::extents(&self.files).map_err(text)?;
        let found = usize::try_from(index).ok().and_then(|index| all.get(index));
        let found = found.ok_or_else(|| {
            format!("extent {index} does not exist: {} are with lenders", all.len())
        })?;
        let mut address = [0; 256];
        let name = found.lease.address.to_string();
        let room = address.get_mut(..name.len()).ok_or("the lender's address is too long")?;
        room.copy_from_slice(name.as_bytes());
        Ok(Extent {
            from: found.from.0,
            at: found.at.0,
            lease: found.lease.lease.0.to_be_bytes(),
            address,
        })
    }
}

/// Opens a region to ask about it, or returns null.
///
/// # Safety
/// `file` must point to a string that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_open(file: *const c_char) -> *mut Region {
    // SAFETY: the caller's promise.
    handle(open(unsafe { CStr::from_ptr(file) }, false))
}

/// Opens a region and maps it, or returns null.
///
/// # Safety
/// As [`aquifer_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_map(file: *const c_char) -> *mut Region {
    // SAFETY: the caller's promise.
    handle(open(unsafe { CStr::from_ptr(file) }, true))
}

/// Returns the address of the region's memory, or null if it is not mapped.
///
/// # Safety
/// `region` must be open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_memory(region: *const Region) -> *mut c_void {
    // SAFETY: the caller's promise.
    let region = unsafe { &*region };
    region
        .mapped
        .as_ref()
        .map_or(ptr::null_mut(), |mapped| mapped.bytes().as_ptr().cast_mut().cast())
}

/// Unmaps and closes the region.
///
/// # Safety
/// `region` must be open and out of use in all threads, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_close(region: *mut Region) {
    if !region.is_null() {
        // SAFETY: the pointer came from a box, and the caller promises not to use it again.
        drop(unsafe { Box::from_raw(region) });
    }
}

/// Sets the limit of the local cache in bytes. Waits until the cache is within it.
///
/// # Safety
/// `region` must be open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_cache_size(region: *const Region, bytes: u64) -> c_int {
    // SAFETY: the caller's promise.
    let region = unsafe { &*region };
    answer(client::resize_cache(&region.files, Bytes(bytes), client::By::Operator).map_err(text))
}

/// Writes the states of `count` pages from page `first` on, one byte each.
///
/// # Safety
/// `region` must be open, and `states` must have room for `count` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_page_states(
    region: *const Region,
    first: u64,
    count: u64,
    states: *mut u8,
) -> c_int {
    // SAFETY: the caller's promise.
    let region = unsafe { &*region };
    answer(client::states(&region.files, Run { first, count }).map_err(text).map(|found| {
        for (at, state) in found.into_iter().enumerate() {
            // SAFETY: there are `count` states, and the caller promises the room.
            unsafe { states.add(at).write(state as u8) };
        }
    }))
}

/// Writes to the lenders all changes made before the call. Other threads may go on writing.
///
/// # Safety
/// `region` must be open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_persist(region: *const Region) -> c_int {
    // SAFETY: the caller's promise.
    let region = unsafe { &*region };
    answer(client::persist(&region.files).map_err(text))
}

/// Discards `count` pages from page `first` on, here and at the lenders.
///
/// # Safety
/// `region` must be open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_drop(region: *const Region, first: u64, count: u64) -> c_int {
    // SAFETY: the caller's promise.
    let region = unsafe { &*region };
    answer(client::drop_pages(&region.files, Run { first, count }).map_err(text))
}

/// Writes the region's figures to `metadata`.
///
/// # Safety
/// `region` must be open, and `metadata` must point to room for the structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_get_metadata(
    region: *const Region,
    metadata: *mut Metadata,
) -> c_int {
    // SAFETY: the caller's promise.
    let region = unsafe { &*region };
    // SAFETY: the caller's promise.
    answer(region.metadata().map(|found| unsafe { metadata.write(found) }))
}

/// Writes the place of the extent of this index, counted from 0, to `extent`.
///
/// # Safety
/// `region` must be open, and `extent` must point to room for the structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aquifer_extent(
    region: *const Region,
    index: u64,
    extent: *mut Extent,
) -> c_int {
    // SAFETY: the caller's promise.
    let region = unsafe { &*region };
    // SAFETY: the caller's promise.
    answer(region.extent(index).map(|found| unsafe { extent.write(found) }))
}

/// Returns the reason of this thread's last failed call. It is valid until the next failed call.
#[unsafe(no_mangle)]
pub extern "C" fn aquifer_error() -> *const c_char {
    ERROR.with_borrow(|error| error.as_ptr())
}
