//! Common parts of the initiators of every protocol: operations, many in flight, their deadline,
//! and the receive buffer.

mod deadline;
mod failure;
mod input;
mod late;
mod operation;
mod pipelined;
mod round;

pub use deadline::{Deadline, Interrupted};
pub use failure::{Failed, Failure};
pub use input::Input;
pub use late::Late;
pub use operation::{Operation, Run, WINDOW};
pub use pipelined::Pipelined;
pub use round::Round;
