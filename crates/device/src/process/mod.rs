//! The volume process (being written).
