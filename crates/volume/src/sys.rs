//! System calls and instructions without a safe wrapper elsewhere. Only this module of the crate
//! uses `unsafe`.

#[cfg(target_arch = "x86_64")]
pub(crate) mod polyval;

use std::io;

/// Keeps memory in RAM until its owner frees it.
pub(crate) fn lock_memory<T>(memory: &[T]) -> io::Result<()> {
    let start = memory.as_ptr().cast_mut().cast();
    // SAFETY: the range is that of a live slice. The kernel only maps and pins its pages; contents
    // and validity stay as they are.
    Ok(unsafe { rustix::mm::mlock(start, size_of_val(memory)) }?)
}
