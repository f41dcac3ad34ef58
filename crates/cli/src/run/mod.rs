//! What `aquifer run` is made of: a command inside a cgroup, its signals and its end.

pub mod child;
