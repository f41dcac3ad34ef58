//! Common parts of the initiators of every protocol: operations, many in flight, their deadline,
//! and the receive buffer.

mod deadline;
mod input;
mod operation;
mod round;

pub use deadline::{Deadline, Interrupted};
pub use input::Input;
pub use operation::WINDOW;
pub use operation::{Operation, Run};
pub use round::{Round, in_rounds};
