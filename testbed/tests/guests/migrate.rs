//! VMs that `aquifer vm migrate` moves between two hosts on this machine, each with an agent and a
//! network of its own.
//!
//! Needs root and userfaultfd on this machine. `AQUIFER_MOVES` sets how often the VM moves (default
//! 6). `AQUIFER_MATRIX=all` tests every failure in every phase, `left` only those of post-copy.

mod disks;
mod hosts;

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use aquifer_api::client::Client;
use aquifer_api::order;
use aquifer_cli::cgroup::{Cgroup, Hierarchy, Limits, Swap};
use aquifer_page::{Bytes, RegionName};
use aquifer_testbed::wait_until;
use aquifer_vm::migrate::{Mode, Order};
use aquifer_vm::process::{Files, client};
use rustix::process::Signal;

use crate::support::{TIMEOUT, VmHost as _, demo, kill, process_like, step};
use hosts::Hosts;

fn lacks_root() -> bool {
    let lacks = !rustix::process::geteuid().is_root();
    if lacks {
        eprintln!("skipped: needs root");
    }
    lacks
}

/// Starts two hosts, with a VM `one` on host a that is busy with its memory; `None` without root.
fn with_a_vm() -> Result<Option<Hosts>> {
    if lacks_root() {
        return Ok(None);
    }
    let hosts = Hosts::new()?;
    hosts.start("one")?;
    Ok(Some(hosts))
}

#[test]
fn a_vm_moves_to_and_fro_while_it_writes_to_its_memory() -> Result<()> {
    let Some(hosts) = with_a_vm()? else { return Ok(()) };
    let moves = std::env::var("AQUIFER_MOVES").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    hosts.resize("a", "one", Hosts::MAX_GROWTH)?;
    for number in 0..moves {
        let (from, to) = if number % 2 == 0 { ("a", "b") } else { ("b", "a") };
        let before = hosts.ticks(from, "one")?;
        let mode = ["instant", "postcopy", "precopy"][number % 3];
        let moved = hosts.done(
            from,
            &["vm", "migrate", "one", "--to", to, "--mode", mode, "--max-downtime", "1s"],
        )?;
        step(&format!("{from} to {to}: {moved}"));
        let after = hosts.goes_on(to, "one")?;
        ensure!(after[0] > before[0] && after[2] == 0, "{before:?} {after:?}");
        // The agent, which started these, is exempt from the OOM killer.
        for what in ["vm", "region"] {
            let pid = hosts.done(to, &[what, "show", "one"])?["pid"].clone();
            let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj"))?;
            ensure!(score.trim() == "0", "the OOM killer spares the {what}: {score}");
        }
        wait_until("the source host is empty", TIMEOUT, || hosts.is_empty(from))?;
    }
    let here = if moves.is_multiple_of(2) { "a" } else { "b" };
    // The memory that the VM had grown by moved with it.
    let share = hosts.done(here, &["vm", "show", "one"])?["share"].clone();
    ensure!(share["pool"] == (hosts::VM_MEMORY.0 + Hosts::MAX_GROWTH.0), "{share}");
    hosts.resize(here, "one", Bytes::mib(128))?;
    hosts.resize(here, "one", Hosts::MAX_GROWTH)?;
    let last = hosts.goes_on(here, "one")?;
    ensure!(last[2] == 0, "{last:?}");
    hosts.done(here, &["vm", "stop", "one", "--force"])?;
    ensure!(hosts.is_empty(here)?);
    Ok(())
}

#[test]
fn the_demo_moves_a_guest_there_and_back_and_leaves_nothing() -> Result<()> {
    if lacks_root() {
        return Ok(());
    }
    let summary = demo("migrate")?;
    ensure!(summary["guest_errors"] == 0, "{summary}");
    for way in ["there", "back"] {
        let number =
            |of: &str| summary[way][of].as_f64().with_context(|| format!("no {of} in {summary}"));
        ensure!(
            number("downtime_ms")? > 0.0 && number("total_ms")? > number("downtime_ms")?,
            "{summary}"
        );
        ensure!(
            number("silence_ms")? > 0.0 && number("resident_pages")? >= number("dirty_pages")?,
            "{summary}"
        );
        ensure!(
            number("bytes_pages")? + number("bytes_pool")? > 0.0 && number("rounds")? >= 2.0,
            "{summary}"
        );
    }
    ensure!(summary["data_ratio"].as_f64().is_some_and(|ratio| ratio < 1.0), "{summary}");
    Ok(())
}

/// The kernel alone serves the VM until the move, for which the engine learns what there is.
#[test]
fn a_vm_without_a_lender_moves_with_all_of_its_memory() -> Result<()> {
    if lacks_root() {
        return Ok(());
    }
    let hosts = Hosts::new()?;
    hosts.start_local("one")?;
    let region = &hosts.done("a", &["vm", "show", "one"])?["region"];
    ensure!(region["counts"]["zero_faults"] == 0, "{region}");
    let mut before = hosts.ticks("a", "one")?;
    for (from, to, mode) in [("a", "b", "precopy"), ("b", "a", "postcopy"), ("a", "b", "instant")] {
        let moved = hosts.done(
            from,
            &["vm", "migrate", "one", "--to", to, "--mode", mode, "--max-downtime", "5s"],
        )?;
        step(&format!("{from} to {to}: {moved}"));
        let after = hosts.goes_on(to, "one")?;
        ensure!(after[0] > before[0] && after[2] == 0, "{before:?} {after:?}");
        before = after;
        wait_until("the source host is empty", TIMEOUT, || hosts.is_empty(from))?;
        let region = &hosts.done(to, &["vm", "show", "one"])?["region"];
        ensure!(region["volume"]["leases"].as_array().is_some_and(Vec::is_empty), "{region}");
        ensure!(region["usage"]["remote"] == 0 && region["spec"]["auto"] == true, "{region}");
    }
    hosts.done("b", &["vm", "stop", "one", "--force"])?;
    ensure!(hosts.is_empty("a")? && hosts.is_empty("b")?);
    Ok(())
}

/// The destination needs room for the cache only: host b may use less memory than the VM has.
#[test]
fn a_vm_moves_to_a_host_with_less_memory_than_it_has() -> Result<()> {
    let Some(hosts) = with_a_vm()? else { return Ok(()) };
    let limits = Limits { memory: SMALL_HOST_MEMORY, swap: Swap::Forbidden };
    let name = format!("aquifer-small-{}", std::process::id());
    let small = Cgroup::create(&Hierarchy::find()?, &name, limits)?;
    // The limit covers the processes that the agent starts, too.
    small.add(hosts.agent("b")?)?;
    // The agent chooses b: it is the only other host.
    let moved =
        hosts.done("a", &["vm", "migrate", "one", "--cache", "48M", "--max-downtime", "1s"])?;
    ensure!(moved["to"] == "b", "{moved}");
    let [_, _, wrong] = hosts.goes_on("b", "one")?;
    let used = small.memory_used()?;
    step(&format!(
        "a VM of {} runs on a host of {SMALL_HOST_MEMORY}, of which {used} are used: {moved}",
        hosts::VM_MEMORY
    ));
    ensure!(wrong == 0 && used <= SMALL_HOST_MEMORY && hosts::VM_MEMORY > SMALL_HOST_MEMORY);
    let region = &hosts.done("b", &["vm", "show", "one"])?["region"];
    ensure!(region["usage"]["cache"] == Bytes::mib(48).0, "{region}");
    // And back, to the host with more room.
    hosts.done(
        "b",
        &["vm", "migrate", "one", "--to", "a", "--cache", "128M", "--max-downtime", "1s"],
    )?;
    let [_, _, wrong] = hosts.goes_on("a", "one")?;
    ensure!(wrong == 0);
    hosts.done("a", &["vm", "stop", "one", "--force"])?;
    ensure!(hosts.is_empty("a")? && hosts.is_empty("b")?);
    Ok(())
}

/// Memory of host b for its agent, an emulating QEMU, an engine and its cache.
const SMALL_HOST_MEMORY: Bytes = Bytes::mib(192);

/// Checks that refused and cancelled moves do not happen, and that the downtime limit decides the
/// mode.
#[test]
fn a_refused_cancelled_or_endless_move_leaves_the_vm_in_place() -> Result<()> {
    let Some(hosts) = with_a_vm()? else { return Ok(()) };
    // The other host's agreement of its group has no room for the VM.
    hosts.done("b", &["group", "create", "default", "--max-memory", "64M"])?;
    let refused = hosts.ask("a", &["vm", "migrate", "one", "--to", "b"])?;
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success() && why.contains("group 'default' is full"), "{why}");
    let nowhere = hosts.ask("a", &["vm", "migrate", "one"])?;
    let why = String::from_utf8_lossy(&nowhere.stderr).into_owned();
    ensure!(
        !nowhere.status.success()
            && why.contains("no host takes VM 'one', whose cache may take 128MiB: b: ")
            && why.contains("group 'default' is full"),
        "{why}"
    );
    ensure!(state(&hosts, "a") == "running" && hosts.is_empty("b")?);
    hosts.done("b", &["group", "rm", "default"])?;

    let slow = ["vm", "migrate", "one", "--to", "b", "--mode", "precopy", "--bandwidth", "4M"];
    let cancelled = thread::scope(|scope| {
        let moving = scope.spawn(|| hosts.ask("a", &slow));
        wait_until("host b receives the VM", TIMEOUT, || Ok(state(&hosts, "b") == "inmigrate"))?;
        wait_until("the move is cancelled", TIMEOUT, || {
            Ok(hosts.ask("a", &["vm", "migrate", "one", "--cancel"])?.status.success())
        })?;
        moving.join().map_err(|_| anyhow::anyhow!("the thread that moves the VM panicked"))?
    })?;
    let why = String::from_utf8_lossy(&cancelled.stderr).into_owned();
    ensure!(!cancelled.status.success() && why.contains("cancelled"), "{why}");
    ensure!(state(&hosts, "a") == "running");
    wait_until("host b is empty", TIMEOUT, || hosts.is_empty("b"))?;
    let too_late = hosts.ask("a", &["vm", "migrate", "one", "--cancel"])?;
    ensure!(String::from_utf8_lossy(&too_late.stderr).contains("no migration"));

    // A millisecond is never enough: the move fails, or leaves pages behind (post-copy).
    let strict = ["vm", "migrate", "one", "--to", "b", "--max-downtime", "1ms"];
    let refused = hosts.ask("a", &[&strict[..], &["--no-postcopy"]].concat())?;
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    let is_refused = !refused.status.success();
    ensure!(is_refused && why.contains("as fast as the migration sends it"), "{why}");
    ensure!(state(&hosts, "a") == "running");
    let moved = hosts.done("a", &strict)?;
    step(&format!("post-copy, as the rounds do not converge: {moved}"));
    ensure!(moved["mode"] == "postcopy" && moved["left_pages"].as_u64() > Some(0), "{moved}");
    let [_, _, wrong] = hosts.goes_on("b", "one")?;
    ensure!(wrong == 0);
    hosts.done("b", &["vm", "stop", "one", "--force"])?;
    // The source's processes end after the last pages have left.
    wait_until("host a is empty", TIMEOUT, || hosts.is_empty("a"))?;
    ensure!(hosts.is_empty("b")?);
    Ok(())
}

/// The process or link that fails while a VM moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Party {
    AgentHere,
    EngineHere,
    SupervisorHere,
    MoveClient,
    AgentThere,
    EngineThere,
    SupervisorThere,
    QemuThere,
    /// The lender stops answering for three seconds.
    Lender,
    /// The link is down for three seconds.
    Link,
}

use Party::*;

const ALL_PARTIES: [Party; 10] = [
    AgentHere,
    EngineHere,
    SupervisorHere,
    MoveClient,
    AgentThere,
    EngineThere,
    SupervisorThere,
    QemuThere,
    Lender,
    Link,
];

/// The phase of post-copy: the VM runs, but part of its memory is still at the source.
const POSTCOPY_PHASE: &str = "sending the pages left at the source";

/// The parties that post-copy needs, or seems to need; in a short test only the first
/// [`SHORT_TEST_PARTIES`] fail.
const POSTCOPY_PARTIES: [Party; 7] =
    [SupervisorThere, EngineHere, SupervisorHere, EngineThere, AgentHere, AgentThere, Link];
const SHORT_TEST_PARTIES: usize = 2;

/// The phases in which one of [`ALL_PARTIES`] fails.
const PHASES: [&str; 4] = ["writing back to the pool", "stopping", "handing over", "giving away"];

#[test]
fn a_vm_is_on_one_side_and_whole_if_a_process_dies_in_its_move() -> Result<()> {
    let Some(hosts) = with_a_vm()? else { return Ok(()) };
    let matrix = std::env::var("AQUIFER_MATRIX").unwrap_or_default();
    let (all, only_left) = (matrix == "all" || matrix == "left", matrix == "left");
    let mut here = "a";
    for (number, party) in ALL_PARTIES.into_iter().enumerate().filter(|_| !only_left) {
        for (at, when) in PHASES.into_iter().enumerate() {
            if !all && at != (number + 2) % PHASES.len() {
                continue;
            }
            here = move_with_failure(&hosts, here, party, when)
                .with_context(|| format!("{party:?} died at '{when}'"))?;
            hosts.start_agent("a")?;
            hosts.start_agent("b")?;
        }
    }
    let count = if all { POSTCOPY_PARTIES.len() } else { SHORT_TEST_PARTIES };
    for party in POSTCOPY_PARTIES.into_iter().take(count) {
        here = move_with_failure(&hosts, here, party, POSTCOPY_PHASE)
            .with_context(|| format!("{party:?} died at '{POSTCOPY_PHASE}'"))?;
        hosts.start_agent("a")?;
        hosts.start_agent("b")?;
    }
    // Without the lender, a processor of the VM waits forever; `vm stop` must still work.
    kill(hosts.lending(), Signal::KILL)?;
    hosts.done(here, &["vm", "stop", "one", "--force"])?;
    ensure!(hosts.is_empty("a")? && hosts.is_empty("b")?);
    Ok(())
}

/// Moves the VM, fails one process or link in the phase `when`, and returns the VM's host after
/// that.
fn move_with_failure(
    hosts: &Hosts,
    here: &'static str,
    party: Party,
    when: &str,
) -> Result<&'static str> {
    let there = if here == "a" { "b" } else { "a" };
    let mut order = prepare_destination(hosts, here, there)?;
    if when == POSTCOPY_PHASE {
        // The limit makes this phase last.
        (order.how.mode, order.how.bandwidth) = (Mode::PostCopy, Some(Bytes::mib(16)));
    }
    // Find the victim first, as a phase may be over soon.
    let victim = match party {
        AgentHere => hosts.agent(here)?,
        EngineHere => hosts.of(here).engine("one")?,
        SupervisorHere => hosts.of(here).supervisor()?,
        AgentThere => hosts.agent(there)?,
        EngineThere => hosts.of(there).engine("one")?,
        SupervisorThere => hosts.of(there).supervisor()?,
        QemuThere => process_like(&format!("qemu.*{}/", hosts.run_dir(there).display()))?,
        Lender | Link | MoveClient => hosts.lending(),
    };
    let mut done: Option<Result<()>> = None;
    let files = Files::new(&hosts.run_dir(here), &order.vm);
    let moved = client::migrate(&files, &order.how, |progress| {
        if progress.phase != when || done.is_some() {
            return true;
        }
        done = Some(fail(hosts, party, victim));
        // The move must go on without the client that asked for it.
        party != MoveClient && when != POSTCOPY_PHASE
    });
    done.with_context(|| format!("the move never reached '{when}'"))??;
    let moved = match moved {
        Ok(report) => format!("moved, {:.0} ms", report.total_ms),
        Err(error) => error.to_string(),
    };
    let is = where_it_runs(hosts, here, there)?;
    step(&format!("{party:?} at '{when}': {moved}; the VM runs on {is}"));
    let other = if is == "a" { "b" } else { "a" };
    if when == POSTCOPY_PHASE {
        ensure!(is == there, "the VM must run at the destination");
        // `vm resume` starts a killed supervisor again, which sends or fetches the remaining pages.
        let _ = hosts.ask(there, &["vm", "resume", "one"])?;
        let _ = hosts.ask(here, &["vm", "resume", "one"])?;
        wait_until("the source host is empty", Duration::from_secs(60), || hosts.is_empty(here))?;
        ensure!(hosts.done(there, &["vm", "show", "one"])?["awaiting_source"].is_null());
    }
    let [_, _, wrong] = hosts.goes_on(is, "one")?;
    ensure!(wrong == 0, "{wrong} pages are wrong");
    if !hosts.is_empty(other)? {
        // If the supervisor died there, `vm stop` clears away the rest.
        let _ = hosts.ask(other, &["vm", "stop", "one", "--force"])?;
        wait_until("the other host is empty", Duration::from_secs(60), || hosts.is_empty(other))?;
    }
    // A killed supervisor must run again, so that the VM can move.
    hosts.done(is, &["vm", "resume", "one"])?;
    Ok(is)
}

fn fail(hosts: &Hosts, party: Party, victim: u32) -> Result<()> {
    let silence = Duration::from_secs(3);
    match party {
        MoveClient => {}
        Lender => {
            kill(victim, Signal::STOP)?;
            thread::sleep(silence);
            kill(victim, Signal::CONT)?;
        }
        Link => {
            hosts.network().connect(false)?;
            thread::sleep(silence);
            hosts.network().connect(true)?;
        }
        _ => kill(victim, Signal::KILL)?,
    }
    Ok(())
}

struct PendingMove {
    vm: RegionName,
    how: Order,
}

/// Makes the destination wait for the VM, as `aquifer vm migrate` does first.
fn prepare_destination(hosts: &Hosts, here: &str, there: &str) -> Result<PendingMove> {
    let vm: RegionName = "one".parse()?;
    let agent = Client::local(&hosts.run_dir(here).join("agent.sock"))
        .with_timeout(Duration::from_secs(70));
    let order = order::Migrate { vm: vm.clone(), to: Some(there.parse()?), cache: None };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let order::Awaited { migration, address, identity, defined, .. } =
        runtime.block_on(agent.post(aquifer_api::path::MIGRATE, &order))?;
    let (to, mode, bandwidth) = (there.parse()?, Mode::Instant, None);
    let max_downtime = Duration::from_secs(1);
    Ok(PendingMove {
        vm,
        how: Order {
            migration,
            to,
            address,
            identity,
            mode,
            bandwidth,
            max_downtime,
            may_leave: false,
            defined,
        },
    })
}

/// Waits until the VM runs on one side. While the VM is paused, this function resumes it, by force
/// only if the other side says that it does not own the VM.
fn where_it_runs(hosts: &Hosts, here: &'static str, there: &'static str) -> Result<&'static str> {
    let deadline = Instant::now() + Duration::from_secs(90);
    loop {
        let states = [here, there].map(|host| state(hosts, host));
        let running = states.each_ref().map(|state| state == "running");
        match running {
            [true, true] => bail!("the VM runs on both hosts"),
            [true, false] => return Ok(here),
            [false, true] => return Ok(there),
            [false, false] if Instant::now() > deadline => {
                bail!("the VM runs on neither host: {states:?}")
            }
            [false, false] => {}
        }
        thread::sleep(Duration::from_secs(1));
        for (host, other) in [(here, there), (there, here)] {
            let resumed = hosts.ask(host, &["vm", "resume", "one"])?;
            let why = String::from_utf8_lossy(&resumed.stderr).into_owned();
            // The VM waits for the word of the other host, which has no VM or has given it away. Or
            // this host gave the VM away, and the other one does not have it.
            let word = hosts.ask(other, &["vm", "resume", "one"])?;
            let word = String::from_utf8_lossy(&word.stderr).into_owned();
            let is_here =
                ["there is no VM", "and belongs to it"].iter().any(|sign| word.contains(sign));
            let is_back = why.contains("and belongs to it") && word.contains("there is no VM");
            if why.contains("to confirm the hand-over") && is_here || is_back {
                hosts.ask(host, &["vm", "resume", "one", "--force"])?;
            }
            if resumed.status.success() {
                break;
            }
        }
    }
}

/// Returns the VM's state on a host; `none` if the VM is not there.
fn state(hosts: &Hosts, host: &str) -> String {
    hosts.of(host).vm_state("one")
}
