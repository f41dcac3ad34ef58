//! Tests of `device` in guests with the kernel modules. Every backend of Debian's kernels becomes a
//! block device that keeps its data. The tests also remove a volume process over the best backend,
//! in order and after a kill.

use std::time::Duration;

use anyhow::Result;
use aquifer_page::Bytes;
use aquifer_testbed::{Kernel, Shell as _, Spec, Testbed};

use crate::support::{example, test};

const TEST_TIMEOUT: Duration = Duration::from_secs(240);

#[test]
fn of_kernel_6_1_nbd_and_fuse_loop() -> Result<()> {
    backends_pass(Spec::new("old").kernel(Kernel::V6_1), "nbd fuse-loop")
}

#[test]
fn of_kernel_6_12_ublk_nbd_and_fuse_loop() -> Result<()> {
    let spec = Spec::new("new").kernel(Kernel::V6_12).cpus(2);
    backends_pass(spec.module("ublk_drv"), "ublk nbd fuse-loop")
}

/// Runs the tests of `device` in a host that must have these backends, the best first.
fn backends_pass(spec: Spec, backends: &str) -> Result<()> {
    let mut spec = spec.memory(Bytes::gib(1)).modules(["fuse", "loop", "nbd"]);
    // The tests look for the examples in a directory beside their own.
    spec = spec.file(test("blockdev", "blockdev"), "/tests/deps/blockdev");
    for (room, name) in [("blockdev", "volume_process"), ("nbd", "nbd_memory")] {
        spec = spec.file(example(room, name), &format!("/tests/examples/{name}"));
    }
    let hosts = Testbed::start([spec])?;
    for room in ["allocation::", "backends::", "process::"] {
        let test = format!("/tests/deps/blockdev {room} --test-threads 2");
        let test = format!("AQUIFER_TEST_BACKENDS='{backends}' RUST_BACKTRACE=1 {test}");
        hosts.hosts()[0].sh_within(&test, TEST_TIMEOUT)?;
    }
    Ok(())
}
