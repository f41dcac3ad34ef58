//! Our initiator and Linux's own target find each other as they should be: what they do stands in `nvme_initiator.sh`.

use std::time::Duration;

use anyhow::Result;
use aquifer_page::Bytes;
use aquifer_testbed::{Kernel, Spec, Testbed};

use crate::support::example;

const LIMIT: Duration = Duration::from_secs(120);

#[test]
fn the_target_of_kernel_6_1_serves_our_initiator() -> Result<()> {
    // Debian built this one without authentication.
    serves(Spec::new("old").kernel(Kernel::V6_1), "no")
}

#[test]
fn the_target_of_kernel_6_12_serves_our_initiator() -> Result<()> {
    serves(Spec::new("new").kernel(Kernel::V6_12), "authenticates")
}

fn serves(spec: Spec, authenticates: &str) -> Result<()> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/guests/nvme_initiator.sh");
    let spec = spec
        .memory(Bytes::gib(1))
        .modules(["nvmet", "nvmet-tcp", "brd", "crc32c_generic"])
        .file(example("fabric", "nvme_check"), "/bin/nvme_check")
        .file(script, "/bin/nvme-initiator-test");
    let hosts = Testbed::start([spec])?;
    hosts.hosts()[0].sh_within(&format!("sh /bin/nvme-initiator-test {authenticates}"), LIMIT)?;
    Ok(())
}
