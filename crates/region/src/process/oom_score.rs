//! The exemption from the OOM killer, which must not pass from an agent to what it starts.

use std::fs;
use std::io;

/// The kernel's setting of a process's chance to be killed when memory runs out (proc(5)).
const FILE: &str = "/proc/self/oom_score_adj";

/// The setting of a process that the kernel never kills.
const EXEMPT: &str = "-1000";

/// Ends an exemption of this process from the OOM killer.
///
/// An agent is exempt, and its children inherit that. VMs and regions arrive by an agent, and must
/// not be spared while the kernel kills everything else.
///
/// # Errors
/// If /proc cannot be read or written.
pub fn end_oom_exemption() -> io::Result<()> {
    if fs::read_to_string(FILE)?.trim() == EXEMPT { fs::write(FILE, "0") } else { Ok(()) }
}
