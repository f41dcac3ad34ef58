//! A region in the memory of a program.
//!
//! A region is a file of which only some pages are there. A program maps it and puts the mapping under the care of the region's
//! engine, another process: [`Mapping::adopt`] registers it with userfaultfd and hands the descriptor over. From then on
//! the engine brings every page that is touched. It asks back for what only the program itself can do, which is to unmap pages, and to
//! map a page of another file in the place of one that is equal; a thread that the mapping started does so.
//!
//! An engine that dies leaves the program waiting at its next fault. The thread hands the descriptor to the next engine.

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
