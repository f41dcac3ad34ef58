//! Tests of the testbed itself: kernels boot, commands run, links are cut, plugs are pulled.

use std::time::{Duration, Instant};

use anyhow::Result;
use aquifer_page::Bytes;
use aquifer_testbed::{Kernel, Shell as _, Spec, Testbed};
use rustix::process::Signal;

use crate::support::all_steps;

const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

#[test]
fn both_kernels_boot_with_modules_and_reach_each_other_by_name() -> Result<()> {
    let modules =
        ["fuse", "loop", "nbd", "brd rd_nr=1 rd_size=4096", "nvmet-tcp", "nvme-tcp", "sch_netem"];
    let hosts = Testbed::start([
        Spec::new("old").kernel(Kernel::V6_1).modules(modules),
        Spec::new("new")
            .kernel(Kernel::V6_12)
            .modules(modules)
            .module("ublk_drv")
            .memory(Bytes::mib(320)),
    ])?;
    let (old, new) = (&hosts["old"], &hosts["new"]);
    assert!(old.sh("uname -r")?.starts_with("6.1."));
    assert!(new.sh("uname -r")?.starts_with("6.12."));
    old.sh("ls /dev/fuse /dev/loop-control /dev/nbd0 /dev/nvme-fabrics")?;
    new.sh("ls /dev/fuse /dev/loop-control /dev/nbd0 /dev/nvme-fabrics /dev/ublk-control")?;
    assert_eq!(old.sh("cat /sys/block/ram0/size")?, "8192\n");
    old.sh("ping -c 1 -W 10 new")?;
    new.sh("ping -c 1 -W 10 old")?;
    assert_eq!(new.sh("hostname; hostname -i")?, "new\n10.77.0.2\n");
    Ok(())
}

#[test]
fn hosts_run_commands_lose_links_and_power_and_show_failures() -> Result<()> {
    let hosts = Testbed::start(["a", "b", "c"].map(Spec::new))?;
    all_steps(
        &hosts,
        &[
            ("commands run side by side and files go both ways", commands_and_files),
            ("a link that is cut carries nothing until it is mended", links),
            ("a host whose plug is pulled is gone at once and boots again as new", plugs),
            ("a host that fails shows its console", consoles),
        ],
    )
}

fn commands_and_files(hosts: &Testbed) -> Result<()> {
    let a = &hosts["a"];
    let failed = a.run("echo out; echo err >&2; exit 3")?;
    assert_eq!(
        (failed.code, failed.stdout.as_str(), failed.stderr.as_str()),
        (3, "out\n", "err\n")
    );
    let error = a.sh("echo why >&2; false").unwrap_err().to_string();
    assert!(error.contains("host a: 'echo why >&2; false' ended with 1:\nwhy"), "{error}");

    let echo =
        a.spawn("while read -r line; do echo \"heard $line\"; done; echo end; sleep 1000")?;
    echo.write("one\ntwo\n");
    assert_eq!(echo.wait_for("heard", ANSWER_TIMEOUT)?, "heard one");
    assert_eq!(a.sh("echo meanwhile")?, "meanwhile\n");
    assert_eq!(echo.wait_for("heard", ANSWER_TIMEOUT)?, "heard two");
    echo.end_input();
    echo.wait_for("end", ANSWER_TIMEOUT)?;
    echo.signal(Signal::TERM);
    assert_eq!(echo.output(ANSWER_TIMEOUT)?.code, 128 + Signal::TERM.as_raw());

    // Every byte, and more bytes than any pipe on the way holds.
    let content: Vec<u8> =
        (0..1_000_000_u32).flat_map(|word| word.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    a.write("/tmp/deep/down/it's here", &content)?;
    let read = a.read("/tmp/deep/down/it's here")?;
    assert!(read == content, "the file's content changed on the way");
    Ok(())
}

fn links(hosts: &Testbed) -> Result<()> {
    hosts["b"].cut();
    assert!(!hosts["a"].run("ping -c 1 -W 2 b")?.success());
    hosts["a"].sh("ping -c 1 -W 10 c")?;
    hosts["b"].sh("echo 'commands still reach it'")?;
    hosts["b"].mend();
    hosts["a"].sh("ping -c 3 -W 10 b")?;
    Ok(())
}

fn plugs(hosts: &Testbed) -> Result<()> {
    let (a, b) = (&hosts["a"], &hosts["b"]);
    b.write("/run/mark", "here")?;
    let waiting = b.spawn("sleep 1000")?;
    let pulled = Instant::now();
    b.pull_plug()?;
    let error = waiting.output(ANSWER_TIMEOUT).unwrap_err().to_string();
    assert!(error.contains("host b") && error.contains("the host stopped"), "{error}");
    assert!(pulled.elapsed() < ANSWER_TIMEOUT);
    assert!(b.sh("true").unwrap_err().to_string().contains("host b is switched off"));
    assert!(!a.run("ping -c 1 -W 2 b")?.success());

    b.boot()?;
    assert!(!b.run("test -e /run/mark")?.success());
    a.sh("ping -c 3 -W 10 b")?;
    Ok(())
}

/// The last step, because it crashes a host.
fn consoles(hosts: &Testbed) -> Result<()> {
    let a = &hosts["a"];
    let hangs = a.run_within("sleep 1000", Duration::from_millis(500)).unwrap_err().to_string();
    // The kernel's answer to `Console::ask` after the timeout.
    assert!(
        hangs.contains("has not ended within 500ms") && hangs.contains("Mem-Info"),
        "{}",
        a.console()
    );
    let crash = a.spawn("echo c >/proc/sysrq-trigger")?;
    let crashes = crash.output(ANSWER_TIMEOUT).unwrap_err().to_string();
    assert!(crashes.contains("the host stopped") && crashes.contains("Kernel panic"), "{crashes}");
    Ok(())
}
