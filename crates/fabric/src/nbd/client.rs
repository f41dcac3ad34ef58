//! The NBD initiator.
