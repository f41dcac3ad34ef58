//! A region in the memory of a program.
//!
//! A region is a file of which only some pages are present. A program maps the file, and
//! [`Mapping::adopt`] registers the mapping with userfaultfd. It then hands the descriptor to the
//! region's engine, another process, which provides every page that the program touches.
//!
//! The engine orders back only the steps that need the program's own address space. The program's
//! thread, which the mapping starts, unmaps pages and maps equal pages of another file in their
//! place.
//!
//! If the engine dies, the program waits at its next fault. The thread hands the descriptor to the
//! next engine.

mod client;
mod connection;
mod live;
mod message;
mod region;
mod sharing;
mod sys;
mod userfault;

pub use client::{AdoptError, Mapping};
pub use connection::{Connection, Listener};
pub use live::Live;
pub use message::{Attach, Order, Release, Reply, Request, Run, Shared, VERSION};
pub use region::{Opened, Region, socket_of, window};
pub use sys::FileMap;
pub use userfault::{Fault, Filled, Userfault};
