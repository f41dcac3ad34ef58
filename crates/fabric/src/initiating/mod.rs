//! Common parts of the initiators of every protocol: operations, many in flight, their deadline,
//! and the receive buffer.

mod deadline;
mod input;
mod operation;
mod round;

pub(crate) use deadline::{Deadline, Interrupted};
pub(crate) use input::Input;
pub(crate) use operation::WINDOW;
pub use operation::{Operation, Run};
pub(crate) use round::{Round, in_rounds};
