//! The memory behind leases: mapped files, the state of their pages, and locks on them.
//!
//! This module has the only unsafe code of the crate. It is sound for three reasons. Code reaches
//! the bytes of a lease's own file, and the entries of its table, only through a value that holds
//! the locks of those pages. Only the owner of a [`Blank`] writes to a frame, and it finishes
//! before anything refers to the frame. The store's directory is locked against other processes.

mod frames;
mod held;
mod mapping;
mod private_pages;
mod states;
mod table;

pub(crate) use frames::{Blank, FrameFile};
pub(crate) use held::LeasePages;
pub(crate) use private_pages::{PrivatePages, PrivateRead, PrivateWrite};
pub(crate) use table::{HOLE, LOST, Table, TableRead, TableWrite};
