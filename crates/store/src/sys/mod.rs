//! The memory behind leases: mapped files, the state of their pages, and the two kinds of hold on them.
//!
//! The only unsafe code of this crate. What makes it sound: bytes of a lease's own file, and entries of its table, are only
//! reached through what holds the locks of the pages concerned; a frame is only written by who has it as a [`Blank`], and
//! that is over before anything refers to it; and the store's directory is locked against other processes.

mod frames;
mod mapping;
mod own;
mod states;
mod table;

pub(crate) use frames::{Blank, FrameFile};
pub(crate) use own::{OwnPages, OwnRead, OwnWrite};
pub(crate) use table::{HOLE, LOST, Table, TableRead, TableWrite};
