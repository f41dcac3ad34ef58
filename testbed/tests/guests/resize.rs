//! VMs on this machine that grow and shrink while they run. Even after failures, the memory set
//! aside for guests equals the memory that they have plus the free memory.
//!
//! Needs root on this machine.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};
use aquifer_hosts::daemon::VM_BALANCER;
use aquifer_page::Bytes;
use aquifer_testbed::{Guest, Shell as _, Spec, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::{Here, Load, TIMEOUT, aquifer, binary, example, step};

const BOOT_MEMORY: Bytes = Bytes::mib(256);
const MAX_MEMORY: Bytes = Bytes::mib(1024);

/// The memory that a load leaves which makes a guest run low: well below the 32 MiB at which the
/// guest asks for its reserve, and enough that its kernel does not kill the load.
const LEFT_AVAILABLE: Bytes = Bytes::mib(16);

/// Describes a guest with the modules for memory hot-plug, and with Aquifer's agent.
fn spec() -> Spec {
    let agent = aquifer().with_file_name("aquifer-guest");
    let spec = Spec::new("guest").file(example("blockdev", "touch"), "/bin/checked-memory");
    spec.file(agent, "/bin/aquifer-guest").modules(["virtio_mem", "virtio_balloon"])
}

fn new_host() -> Result<Here> {
    let mut host = Here::new(spec(), Bytes::mib(1536))?;
    host.parts.append += " init_on_alloc=0";
    host.done(&["vm", "set-budget", "--memory", "1536M"])?;
    Ok(host)
}

/// Starts a guest, and the agent in it.
fn start(host: &Here, name: &str, words: &[&str]) -> Result<Guest> {
    let (boot, most) = (BOOT_MEMORY.0.to_string(), MAX_MEMORY.0.to_string());
    let mut memory = vec!["--memory", &boot, "--max-memory", &most];
    memory.extend(words);
    let guest = host.start(name, &memory, &[])?;
    guest.sh("(setsid aquifer-guest run </dev/null >/dev/null 2>/run/agent.log &)")?;
    wait_until("the VM's guest agent is connected", TIMEOUT, || {
        Ok(guest.sh("aquifer-guest show").is_ok_and(|said| said.contains("connected")))
    })?;
    Ok(guest)
}

/// Returns the JSON of `vm resize --json`, also if the VM got only part of the way.
fn resize(host: &Here, words: &[&str]) -> Result<Value> {
    let output = Command::new(aquifer())
        .args(["--json", "vm", "resize"])
        .args(words)
        .env("AQUIFER_RUN_DIR", host.dir.path())
        .output()?;
    let text =
        String::from_utf8(if output.stdout.is_empty() { output.stderr } else { output.stdout })?;
    serde_json::from_str(&text).with_context(|| format!("{words:?}: {text}"))
}

/// Checks that the reserved memory equals the used plus the free, and that `vm` has `size` of it.
fn check_accounts(host: &Here, vm: &str, size: Bytes) -> Result<()> {
    let accounts = host.done(&["vm", "show-budget"])?;
    for of in ["local", "pool"] {
        let number = |what: &str| accounts[of][what].as_u64().unwrap_or(u64::MAX);
        ensure!(number("reserved") == number("used") + number("free"), "{accounts}");
    }
    let share = &accounts["vms"][vm];
    let kind = if share["kind"] == "pool" { "pool" } else { "local" };
    ensure!(share[kind].as_u64().unwrap_or(0) == size.0, "{vm} should have {size}: {accounts}");
    Ok(())
}

fn guest_memory(guest: &Guest) -> Result<u64> {
    Ok(meminfo(guest, "MemTotal")?.0)
}

/// Returns a line of the guest's /proc/meminfo, in whole pages.
fn meminfo(guest: &Guest, name: &str) -> Result<Bytes> {
    let line = guest.sh(&format!("grep {name} /proc/meminfo"))?;
    let kib = line.split_whitespace().nth(1).with_context(|| format!("{name} has no number"))?;
    Ok(Bytes::kib(kib.parse::<u64>()? / 4 * 4))
}

fn why(answer: &Value) -> String {
    answer["error"]["why"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn a_guest_grows_and_shrinks_or_the_answer_says_why_not() -> Result<()> {
    let host = new_host()?;
    let guest = start(&host, "one", &["--reserve", "128M"])?;
    let before = guest_memory(&guest)?;

    step("grow: the guest gets at least the size asked for, usable at once");
    let grown = resize(&host, &["one", "--memory", "700M", "--stages"])?;
    ensure!(grown["reached"] == Bytes::mib(768).0 && grown["usable"] == true, "{grown}");
    ensure!(guest_memory(&guest)? == before + Bytes::mib(512).0);
    ensure!(
        grown["stages"].to_string().contains("onlining"),
        "the answer lacks the guest kernel's stages: {grown}"
    );
    check_accounts(&host, "one", Bytes::mib(768))?;

    step("impossible sizes are refused before any change");
    let refused = resize(&host, &["one", "--memory", "2G"])?;
    ensure!(why(&refused).contains("more than the VM can have"), "{refused}");
    let refused = resize(&host, &["one", "--memory", "100M"])?;
    ensure!(why(&refused).contains("less than the VM booted with"), "{refused}");
    let refused = resize(&host, &["one", "--exact", "--memory", "701M"])?;
    ensure!(why(&refused).contains("cannot be met exactly"), "{refused}");
    let exact = resize(&host, &["one", "--exact", "--memory", "700M"])?;
    ensure!(exact["reached"] == Bytes::mib(700).0 && exact["why"].is_null(), "{exact}");
    check_accounts(&host, "one", Bytes::mib(700))?;

    step("shrink: the guest keeps the memory in use, and the answer says so");
    let load = Load::start(&guest, Bytes::mib(420), 1000)?;
    load.filled()?;
    let part = resize(&host, &["one", "--memory", "256M", "--retry", "1s"])?;
    ensure!(part["why"]["reason"] == "in_use", "{part}");
    let reached = Bytes(part["reached"].as_u64().context("the answer has no size")?);
    ensure!(reached > Bytes::mib(420) && reached <= Bytes::mib(700), "{part}");
    load.verify()?;
    check_accounts(&host, "one", reached)?;
    load.end()?;
    let shrunk = resize(&host, &["one", "--memory", "256M"])?;
    ensure!(shrunk["reached"] == BOOT_MEMORY.0 && shrunk["why"].is_null(), "{shrunk}");
    ensure!(guest_memory(&guest)? == before);

    step("programs in the guest ask for memory, up to the VM's maximum");
    guest.sh("aquifer-guest request +128M --why test")?;
    check_accounts(&host, "one", Bytes::mib(384))?;
    ensure!(guest.sh("! aquifer-guest request +2G 2>&1")?.contains("more than the VM can have"));
    host.done(&["vm", "set", "one", "--max", "512M"])?;
    ensure!(guest.sh("! aquifer-guest request +256M 2>&1")?.contains("512MiB"));
    guest.sh("aquifer-guest request -128M")?;
    check_accounts(&host, "one", BOOT_MEMORY)?;

    step("a guest that runs out of memory gets its reserve at once");
    host.done(&["vm", "set", "one", "--max", "1G"])?;
    host.done(&["vm", "set-budget", "--memory", "384M"])?;
    let refused = resize(&host, &["one", "--memory", "384M"])?;
    ensure!(why(&refused).contains("is reserved for VMs that run out of memory"), "{refused}");
    guest.sh("echo 1 >/proc/sys/vm/overcommit_memory")?;
    let load =
        Load::start(&guest, meminfo(&guest, "MemAvailable")?.saturating_sub(LEFT_AVAILABLE), 1000)?;
    load.filled()?;
    wait_until("the VM has its reserve", TIMEOUT, || {
        Ok(check_accounts(&host, "one", Bytes::mib(384)).is_ok())
    })?;
    load.verify()?;
    load.end()?;
    host.done(&["vm", "set-budget", "--memory", "1536M"])?;
    let shrunk = resize(&host, &["one", "--memory", "256M"])?;
    ensure!(shrunk["why"].is_null(), "{shrunk}");

    step("'vm show' reports the times of the resizes");
    let times = host.done(&["vm", "show", "one"])?;
    ensure!(times["times"]["add"]["total"]["count"].as_u64().unwrap_or(0) >= 3, "{times}");
    Ok(())
}

/// Kills a process, and waits until it is dead.
fn kill(pid: u32) -> Result<()> {
    kill_process(Pid::from_raw(pid as i32).context("the process ID is 0")?, Signal::KILL)?;
    let status = format!("/proc/{pid}/stat");
    wait_until("the killed process has ended", TIMEOUT, || {
        Ok(std::fs::read_to_string(&status).map_or(true, |status| status.contains(") Z ")))
    })
}

fn supervisor(host: &Here, vm: &str) -> Result<u32> {
    let pattern = format!("serve vm {} {vm}$", host.dir.path().display());
    let found = Command::new("pgrep").args(["-f", &pattern]).output()?;
    Ok(String::from_utf8(found.stdout)?.trim().parse()?)
}

/// Starts a shrink that the guest cannot finish, with long retries; waits until the guest has given
/// up some memory.
fn begin_shrink(host: &Here, guest: &Guest) -> Result<Child> {
    let before = guest_memory(guest)?;
    let child = Command::new(aquifer())
        .args(["--json", "vm", "resize", "one", "--memory", "256M", "--retry", "600s"])
        .env("AQUIFER_RUN_DIR", host.dir.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    wait_until("the guest gives up memory", TIMEOUT, || Ok(guest_memory(guest)? < before))?;
    Ok(child)
}

#[test]
fn accounts_are_clear_if_a_process_dies_in_a_resize() -> Result<()> {
    let host = new_host()?;
    let guest = start(&host, "one", &[])?;
    let full = |size: &str| resize(&host, &["one", "--memory", size]);
    ensure!(full("1G")?["reached"] == MAX_MEMORY.0);
    let load = Load::start(&guest, Bytes::mib(420), 1000)?;
    load.filled()?;

    step("kill the supervisor, which resizes the VM");
    let mut resizing = begin_shrink(&host, &guest)?;
    kill(supervisor(&host, "one")?)?;
    ensure!(!resizing.wait()?.success(), "'vm resize' must fail when the supervisor dies");
    check_accounts(&host, "one", MAX_MEMORY)?;
    let again = resize(&host, &["one", "--exact", "--memory", "768M"])?;
    ensure!(again["reached"] == Bytes::mib(768).0, "{again}");
    check_accounts(&host, "one", Bytes::mib(768))?;

    step("kill 'vm resize': the VM stays at the size it reached");
    full("1G")?;
    let mut resizing = begin_shrink(&host, &guest)?;
    resizing.kill()?;
    resizing.wait()?;
    let settled = resize(&host, &["one", "--exact", "--memory", "896M"])?;
    ensure!(
        settled["reached"] == Bytes::mib(896).0 && settled["from"].as_u64() < Some(MAX_MEMORY.0),
        "{settled}"
    );
    check_accounts(&host, "one", Bytes::mib(896))?;
    load.verify()?;

    step("kill QEMU");
    let resizing = begin_shrink(&host, &guest)?;
    let pid = host.done(&["vm", "show", "one"])?["pid"].as_u64().context("the VM has no QEMU")?;
    kill(pid as u32)?;
    let end = resizing.wait_with_output()?;
    ensure!(!end.status.success());
    let said = String::from_utf8_lossy(&end.stderr).into_owned();
    ensure!(said.contains("QEMU") || said.contains("is not running"), "{said}");
    wait_until("the dead VM's memory is free", TIMEOUT, || {
        Ok(host.done(&["vm", "show-budget"])?["local"]["used"] == 0)
    })?;
    // In case the supervisor could not tell how QEMU ended.
    let _ = host.done(&["vm", "stop", "one"]);
    Ok(())
}

#[test]
fn a_shrinking_guest_keeps_what_its_programs_use() -> Result<()> {
    let host = new_host()?;
    let guest = start(&host, "one", &[])?;
    ensure!(resize(&host, &["one", "--memory", "1G"])?["reached"] == MAX_MEMORY.0);
    let load = Load::start(&guest, Bytes::mib(420), 1000)?;
    load.filled()?;
    let shrink = || {
        let part = resize(&host, &["one", "--memory", "256M", "--retry", "1s"])?;
        ensure!(part["why"]["reason"] == "in_use", "{part}");
        ensure!(part["reached"].as_u64() > Some(Bytes::mib(420).0), "{part}");
        load.verify()?;
        let killed = guest.sh("awk '$1 == \"oom_kill\" { print $2 }' /proc/vmstat")?;
        ensure!(killed.trim() == "0", "the guest's OOM killer killed {killed} processes");
        ensure!(resize(&host, &["one", "--memory", "1G"])?["reached"] == MAX_MEMORY.0);
        anyhow::Ok(())
    };

    step("the agent knows it, also if the supervisor is new");
    shrink()?;
    kill(supervisor(&host, "one")?)?;
    shrink()?;

    step("without the agent, the balloon driver knows it");
    guest.sh("kill $(pidof aquifer-guest)")?;
    shrink()?;
    kill(supervisor(&host, "one")?)?;
    shrink()
}

#[test]
fn a_resize_that_no_supervisor_read_is_sent_to_the_next() -> Result<()> {
    let host = new_host()?;
    let _guest = start(&host, "one", &[])?;
    for memory in ["768M", "1G", "512M"] {
        let pid = Pid::from_raw(supervisor(&host, "one")? as i32).context("the process ID is 0")?;
        kill_process(pid, Signal::STOP)?;
        let resizing = Command::new(aquifer())
            .args(["--json", "vm", "resize", "one", "--memory", memory])
            .env("AQUIFER_RUN_DIR", host.dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let fds = format!("/proc/{}/fd", resizing.id());
        wait_until("the command has connected", TIMEOUT, || {
            let links = std::fs::read_dir(&fds).into_iter().flatten().flatten();
            let mut links = links.filter_map(|fd| std::fs::read_link(fd.path()).ok());
            Ok(links.any(|link| link.to_string_lossy().starts_with("socket:")))
        })?;
        kill_process(pid, Signal::KILL)?;
        let end = resizing.wait_with_output()?;
        let said = String::from_utf8_lossy(&end.stderr).into_owned();
        ensure!(end.status.success(), "{said}");
    }
    Ok(())
}

#[test]
fn a_guest_that_does_not_answer_is_said_not_to() -> Result<()> {
    let mut host = Here::new(Spec::new("guest"), Bytes::mib(64))?;
    host.parts.append += " init_on_alloc=0";
    host.start("mute", &["--memory", "128M", "--max-memory", "256M"], &[])?;
    let answer = resize(&host, &["mute", "--memory", "256M", "--retry", "0s"])?;
    ensure!(
        answer["why"]["reason"] == "no_answer" && answer["missing"] == Bytes::mib(128).0,
        "{answer}"
    );
    check_accounts(&host, "mute", Bytes::mib(128))
}

#[test]
fn a_guest_grows_into_the_pool_on_a_host_with_little_to_spare() -> Result<()> {
    let host = new_host()?;
    let lender = host.lender();
    host.done(&["vm", "set-budget", "--memory", "256M"])?;
    let guest = start(&host, "one", &["--cache", "128M", "--lender", &lender])?;
    let grown = resize(&host, &["one", "--memory", "1G"])?;
    ensure!(grown["reached"] == MAX_MEMORY.0 && grown["usable"] == true, "{grown}");
    check_accounts(&host, "one", MAX_MEMORY)?;
    let load = Load::start(&guest, Bytes::mib(600), 4000)?;
    load.filled()?;
    load.is_done()?;
    load.verify()?;
    let usage = host.done(&["region", "show", "one"])?["usage"].clone();
    ensure!(usage["resident"].as_u64().unwrap_or(u64::MAX) <= Bytes::mib(128).0, "{usage}");
    ensure!(usage["remote"].as_u64().unwrap_or(0) > Bytes::mib(400).0, "{usage}");
    load.end()?;
    let shrunk = resize(&host, &["one", "--memory", "256M"])?;
    ensure!(shrunk["reached"] == BOOT_MEMORY.0 && shrunk["why"].is_null(), "{shrunk}");
    let usage = host.done(&["region", "show", "one"])?["usage"].clone();
    ensure!(
        usage["zero"].as_u64().unwrap_or(0) >= (MAX_MEMORY - BOOT_MEMORY).0,
        "the pool still holds pages that the guest gave up: {usage}"
    );
    Ok(())
}

/// A QEMU that Aquifer did not start.
struct Foreign(Child);

impl Foreign {
    fn start(host: &Here, qmp: &Path, agent: &Path) -> Result<Self> {
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-M",
            "q35",
            "-accel",
            "tcg,thread=multi",
        ]);
        qemu.args(["-cpu", "max", "-smp", "2", "-m", "256M,slots=1,maxmem=2G"]);
        qemu.args(["-object", "memory-backend-memfd,id=more,size=768M,share=on,reserve=off"]);
        qemu.args(["-device", "virtio-mem-pci,id=vm0,memdev=more,node=0,requested-size=0"]);
        qemu.args(["-qmp", &format!("unix:{},server=on,wait=off", qmp.display())]);
        qemu.args([
            "-chardev",
            &format!("socket,id=agent,server=on,wait=off,path={}", agent.display()),
        ]);
        qemu.args([
            "-device",
            "virtio-serial-pci",
            "-device",
            "virtserialport,chardev=agent,name=org.aquifer.guest.0",
        ]);
        let (kernel, initrd) = (&host.parts.kernel, &host.parts.initrd);
        qemu.arg("-kernel").arg(kernel).arg("-initrd").arg(initrd);
        let serial = host.dir.path().join("foreign-serial");
        qemu.args(["-append", &host.parts.append, "-serial"]);
        qemu.arg(format!("unix:{},server=on,wait=off", serial.display()));
        let line = host.dir.path().join("foreign-line");
        qemu.args(host.parts.arguments(&line));
        Ok(Self(qemu.spawn()?))
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_foreign_vm_is_adopted_resized_and_forgotten() -> Result<()> {
    let host = new_host()?;
    let [qmp, agent, line] =
        ["qmp", "agent", "foreign-line"].map(|name| host.dir.path().join(name));
    let mut foreign = Foreign::start(&host, &qmp, &agent)?;
    wait_until("QEMU's monitor socket exists", TIMEOUT, || Ok(qmp.exists()))?;
    let guest = Guest::connect("foreign", &line, &host.dir.path().join("foreign-serial"))?;
    guest.sh("(setsid aquifer-guest run </dev/null >/dev/null 2>&1 &)")?;
    wait_until("the guest agent runs", TIMEOUT, || Ok(guest.sh("aquifer-guest show").is_ok()))?;
    let text = |path: &Path| path.to_str().context("the path is not UTF-8").map(str::to_owned);
    let (qmp, agent) = (text(&qmp)?, text(&agent)?);
    host.done(&["vm", "adopt", "theirs", "--qmp", &qmp, "--agent", &agent])?;
    check_accounts(&host, "theirs", BOOT_MEMORY)?;
    wait_until("the VM's guest agent is connected", TIMEOUT, || {
        Ok(guest.sh("aquifer-guest show").is_ok_and(|said| said.contains("connected")))
    })?;
    let grown = resize(&host, &["theirs", "--memory", "512M"])?;
    ensure!(grown["reached"] == Bytes::mib(512).0 && grown["usable"] == true, "{grown}");
    check_accounts(&host, "theirs", Bytes::mib(512))?;
    let Err(refused) = host.done(&["vm", "stop", "theirs", "--force"]) else {
        bail!("'vm stop' stopped an adopted VM")
    };
    ensure!(refused.to_string().contains("vm forget theirs"), "{refused}");
    kill(supervisor(&host, "theirs")?)?;
    let shrunk = resize(&host, &["theirs", "--memory", "256M"])?;
    ensure!(shrunk["reached"] == BOOT_MEMORY.0, "{shrunk}");
    host.done(&["vm", "forget", "theirs"])?;
    ensure!(host.done(&["vm", "show-budget"])?["local"]["used"] == 0);
    guest.sh("true")?;
    ensure!(foreign.0.try_wait()?.is_none(), "the forgotten VM must still run");

    step("an adopted VM that ends is forgotten");
    host.done(&["vm", "adopt", "theirs", "--qmp", &qmp])?;
    drop(foreign);
    wait_until("'vm list' is empty", TIMEOUT, || {
        Ok(host.done(&["vm", "list"])?.as_array().is_some_and(Vec::is_empty))
    })?;
    ensure!(host.done(&["vm", "show-budget"])?["local"]["used"] == 0);
    Ok(())
}

/// Lets a guest ask for memory until it has `size`. The balancer may resize it between a look at
/// its size and the request.
fn ask_up_to(host: &Here, guest: &Guest, vm: &str, size: Bytes) -> Result<()> {
    wait_until(&format!("{vm} has {size}"), TIMEOUT, || {
        let shown = host.done(&["vm", "show", vm])?;
        let has = shown["share"]["local"].as_u64().context("the VM has no size")?;
        let missing = size.0.saturating_sub(has);
        if missing > 0 {
            let more = Bytes(missing);
            guest.sh(&format!("aquifer-guest request +{more} --wait 60s --why 'a load comes'"))?;
        }
        Ok(missing == 0)
    })
}

#[test]
fn the_balancer_moves_memory_to_the_guest_that_needs_it() -> Result<()> {
    let host = new_host()?;
    host.done(&["vm", "set-budget", "--memory", "1152M"])?;
    let guests = [start(&host, "one", &[])?, start(&host, "two", &["--cache", "none"])?];
    let mut balance = binary().command(host.dir.path());
    let mut balance = balance.args(VM_BALANCER).args(["--surplus-periods", "2"]).spawn()?;
    let balanced = (|| {
        for guest in [0, 1, 0] {
            let name = ["one", "two"][guest];
            step(&format!("guest {name} needs more than half of the memory"));
            ask_up_to(&host, &guests[guest], name, Bytes::mib(640))?;
            let load = Load::start(&guests[guest], Bytes::mib(480), 1000)?;
            load.filled()?;
            load.is_done()?;
            load.verify()?;
            let killed = guests[guest].sh("awk '$1 == \"oom_kill\" { print $2 }' /proc/vmstat")?;
            ensure!(killed.trim() == "0", "the guest's OOM killer killed {killed} processes");
            load.end()?;
        }
        Ok(())
    })();
    kill_process(Pid::from_child(&balance), Signal::TERM)?;
    balance.wait()?;
    balanced
}
