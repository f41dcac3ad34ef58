//! Aquifer's initiator against Linux's own target; `nvme_initiator.sh` has the steps.

use std::time::Duration;

use anyhow::Result;
use aquifer_page::Bytes;
use aquifer_testbed::{Kernel, Shell as _, Spec, Testbed};

use crate::support::{aquifer, example, with_script};

const TEST_TIMEOUT: Duration = Duration::from_secs(600);

#[test]
fn the_target_of_kernel_6_1_serves_our_initiator() -> Result<()> {
    // Debian built this kernel without NVMe authentication.
    initiator_passes(Spec::new("old").kernel(Kernel::V6_1), "no")
}

#[test]
fn the_target_of_kernel_6_12_serves_our_initiator() -> Result<()> {
    initiator_passes(Spec::new("new").kernel(Kernel::V6_12).cpus(2), "authenticates")
}

fn initiator_passes(spec: Spec, authenticates: &str) -> Result<()> {
    let spec = with_script(spec, "nvme_initiator.sh")
        .memory(Bytes::gib(1))
        .modules(["nvmet", "nvmet-tcp", "brd", "zram", "fuse", "loop", "crc32c_generic"])
        .file(aquifer(), "/bin/aquifer")
        .file(example("nvme", "nvme_check"), "/bin/nvme_check")
        .file(env!("CARGO_BIN_EXE_checked-io"), "/bin/checked-io");
    let hosts = Testbed::start([spec])?;
    let said = hosts.hosts()[0]
        .sh_within(&format!("sh /bin/nvme_initiator.sh {authenticates}"), TEST_TIMEOUT)?;
    eprint!("{said}");
    Ok(())
}
