//! System calls without a safe wrapper elsewhere. Only this module of the crate uses `unsafe`.

use std::io;

/// Keeps memory in RAM until its owner frees it.
pub(crate) fn lock_memory<T>(memory: &[T]) -> io::Result<()> {
    let start = memory.as_ptr().cast_mut().cast();
    // SAFETY: the range is that of a live slice. The kernel only maps and pins its pages; contents
    // and validity stay as they are.
    Ok(unsafe { rustix::mm::mlock(start, size_of_val(memory)) }?)
}
