//! Decisions as pure state machines: no clock, no I/O.
