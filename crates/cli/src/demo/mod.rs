//! The pieces of `aquifer demo`: real processes that hold checked content, two hosts in network namespaces, what is
//! shown while it runs and the picture that remains.

pub mod content;
pub mod live;
pub mod load;
pub mod loader;
pub mod netns;
pub mod picture;
pub mod region;
pub mod sharing;
