//! Linux's own initiator and nvme-cli against Aquifer's target; `nvme_target.sh` has the steps.

use std::time::Duration;

use anyhow::Result;
use aquifer_page::Bytes;
use aquifer_testbed::{Kernel, Shell as _, Spec, Testbed};

use crate::support::{example, tool, with_script};

const TEST_TIMEOUT: Duration = Duration::from_secs(600);

#[test]
fn kernel_6_1_is_content() -> Result<()> {
    // Debian built this kernel without NVMe authentication.
    target_passes(Spec::new("old").kernel(Kernel::V6_1), "no")
}

#[test]
fn kernel_6_12_is_content() -> Result<()> {
    let new = Spec::new("new").kernel(Kernel::V6_12).cpus(2);
    target_passes(new.module("nvme-auth"), "authenticates")
}

fn target_passes(spec: Spec, authenticates: &str) -> Result<()> {
    let mut spec = with_script(spec, "nvme_target.sh")
        .memory(Bytes::gib(1))
        .modules(["nvme-fabrics", "nvme-tcp", "ext4"])
        .file(example("nvme", "nvme_memory"), "/bin/nvme_memory");
    // Not as blkdiscard: busybox has one of that name, which can do less.
    for (program, name) in
        [("nvme", "nvme"), ("fio", "fio"), ("mkfs.ext4", "mkfs.ext4"), ("blkdiscard", "discard")]
    {
        spec = spec.file(tool(program), &format!("/bin/{name}"));
    }
    let hosts = Testbed::start([spec])?;
    let script = format!("sh /bin/nvme_target.sh {authenticates}");
    let said = hosts.hosts()[0].sh_within(&script, TEST_TIMEOUT)?;
    eprint!("{said}");
    Ok(())
}
