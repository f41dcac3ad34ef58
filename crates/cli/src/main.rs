//! The one binary: `aquifer`.

fn main() {}
