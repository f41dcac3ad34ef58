//! The parts of `aquifer run`: swap in the pool, the command's process, and the remains of killed
//! runs.

pub mod child;
pub mod leftovers;
pub mod pool;
pub mod priority;
pub mod watch;
