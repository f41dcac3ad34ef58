//! What `aquifer run` is made of: memory in the pool, a command with its signals and its end, and what killed runs leave.

pub mod child;
pub mod leftovers;
pub mod pool;
pub mod priority;
pub mod watch;
