//! The testbed itself: kernels boot, commands run, links are cut, plugs are pulled.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::Duration;

use aquifer_testbed::{Kernel, Spec, Testbed};

const MODULES: [&str; 3] = ["fuse", "loop", "nbd"];

#[test]
#[ignore = "boots guests: testbed/README.md"]
fn both_kernels_boot_load_their_modules_and_know_each_other() -> anyhow::Result<()> {
    let old = Spec::new("old").kernel(Kernel::V6_1).modules(MODULES);
    let new = Spec::new("new").kernel(Kernel::V6_12).modules(MODULES).module("ublk_drv");
    let hosts = Testbed::start([old, new])?;
    assert!(hosts["old"].sh("uname -r")?.starts_with("6.1."));
    assert!(hosts["new"].sh("uname -r")?.starts_with("6.12."));
    hosts["old"].sh("ls /dev/fuse /dev/loop-control /dev/nbd0")?;
    hosts["new"].sh("ls /dev/fuse /dev/loop-control /dev/nbd0 /dev/ublk-control")?;
    hosts["old"].sh("ping -c 1 -W 5 new")?;
    hosts["new"].sh("ping -c 1 -W 5 old")?;
    let output = hosts["old"].run_within("echo out; echo err >&2; exit 3", Duration::from_secs(20))?;
    assert_eq!((output.code, output.stdout.as_str(), output.stderr.as_str()), (3, "out\n", "err\n"));
    Ok(())
}
