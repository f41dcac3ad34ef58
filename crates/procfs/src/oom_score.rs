//! The kernel's setting of a process's chance to be killed when memory runs out (proc(5)).

use std::fs;
use std::io;

use crate::read;

const FILE: &str = "/proc/self/oom_score_adj";

/// The setting of a process that the kernel never kills.
pub const EXEMPT: i32 = -1000;

/// Sets it for this process.
pub fn set_oom_score(adjustment: i32) -> io::Result<()> {
    fs::write(FILE, adjustment.to_string())
}

/// Ends an exemption of this process from the OOM killer.
///
/// An agent is exempt, and its children inherit that. VMs and regions arrive by an agent, and must
/// not be spared while the kernel kills everything else.
pub fn end_oom_exemption() -> io::Result<()> {
    if read(FILE)?.trim() == EXEMPT.to_string() { set_oom_score(0) } else { Ok(()) }
}
