//! Requests to regions: their creation, status and changes. All calls block.

mod leases;

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use aquifer_control_socket::{Answers, CallError, first_word};
use aquifer_page::{Bytes, Group};
use aquifer_region_client::Run;

pub use self::leases::{add_copy, add_lease, evacuate, keep_disk_copies};
use super::files::{Files, GroupFiles, RegionSpec};
use super::message::{RegionStatus, Request, Response};
use super::pages::{self, Extent, PageState, Pages};
use super::quota::{Book, Limits};
use super::regions;
use super::run::SUBCOMMAND;
use crate::engine::{Merged, Proposal, waiting_programs};
use crate::error::RegionError;
use crate::handover;

/// The timeout of requests that an engine answers from memory.
const ANSWERING: Duration = Duration::from_secs(15);

/// The timeout of requests that may write the whole cache to the lenders.
const WORKING: Duration = Duration::from_secs(600);

/// The timeout of a request to another engine for a part of its quota, while a program waits for
/// it.
const NEIGHBOUR_TIMEOUT: Duration = Duration::from_secs(5);

/// The longest time from an engine's death until the next engine serves.
const RESTART: Duration = Duration::from_secs(3);

/// Creates a region in `directory` and starts its processes with `program`. That program's
/// [`SUBCOMMAND`] must call [`super::run()`]. A failure leaves nothing behind.
///
/// # Errors
/// [`RegionError`].
pub fn create(
    program: &Path,
    directory: &Path,
    spec: &RegionSpec,
) -> Result<RegionStatus, RegionError> {
    create_as(program, directory, spec, false)
}

/// Creates a region that is another host's, which hands it over ([`receive`]) until it is this
/// one's ([`own`]).
///
/// # Errors
/// [`RegionError`].
pub fn create_foreign(
    program: &Path,
    directory: &Path,
    spec: &RegionSpec,
) -> Result<RegionStatus, RegionError> {
    let mut spec = spec.clone();
    spec.leases.iter_mut().for_each(handover::next_generation);
    create_as(program, directory, &spec, true)
}

fn create_as(
    program: &Path,
    directory: &Path,
    spec: &RegionSpec,
    foreign: bool,
) -> Result<RegionStatus, RegionError> {
    let files = Files::new(directory, &spec.name);
    if spec.size.0 == 0 || !spec.size.0.is_multiple_of(aquifer_page::PAGE_SIZE as u64) {
        return Err(RegionError::Misuse(format!(
            "a region's size must be a multiple of 4KiB, and {} is not",
            spec.size
        )));
    }
    let held = regions::ensure(directory).map_err(RegionError::io(format!(
        "cannot mount a tmpfs at {} (needs root)",
        directory.display()
    )))?;
    let made = files.create(spec);
    drop(held);
    let served = || files.make_foreign(foreign).and_then(|()| start(program, &files));
    let created = made.and_then(|()| served().inspect_err(|_| files.remove()));
    if created.is_err() {
        regions::release(directory);
    }
    created
}

/// Serves a region again after its processes were killed, while its programs wait. `program` is as
/// in [`create`].
///
/// # Errors
/// [`RegionError`], also if the region is served already.
pub fn start(program: &Path, files: &Files) -> Result<RegionStatus, RegionError> {
    let fail = || RegionError::io(format!("cannot start the engine with {}", program.display()));
    // Read first, so that the error for an unknown region names it.
    files.read()?;
    let mut supervisor = Command::new(program);
    supervisor.args(SUBCOMMAND).arg("supervisor").arg(files.directory());
    supervisor.arg(files.name().as_str()).stdin(Stdio::null());
    let mut supervisor = first_word::spawn(&mut supervisor, &files.log()).map_err(fail())?;
    match first_word::heard(&mut supervisor, first_word::TIMEOUT).map_err(fail())? {
        Some(Response::Status(status)) => Ok(*status),
        Some(Response::Failed { error }) => {
            let _ = supervisor.wait();
            Err(RegionError::Refused(error))
        }
        _ => {
            let _ = supervisor.kill();
            let _ = supervisor.wait();
            let log = files.log();
            Err(RegionError::Refused(format!(
                "the engine ended before it served the region; its log is {}",
                log.display()
            )))
        }
    }
}

/// Returns the regions in `directory`.
///
/// # Errors
/// The directory cannot be read.
pub fn list(directory: &Path) -> Result<Vec<Files>, RegionError> {
    Files::all(directory)
        .map_err(RegionError::io(format!("cannot list the regions in {}", directory.display())))
}

/// Returns the status of a region.
///
/// # Errors
/// [`RegionError`].
pub fn status(files: &Files) -> Result<RegionStatus, RegionError> {
    status_within(files, ANSWERING)
}

/// Returns the status of a region whose engine answers within `timeout`.
///
/// # Errors
/// [`RegionError`].
pub fn status_within(files: &Files, timeout: Duration) -> Result<RegionStatus, RegionError> {
    match asked(files, &Request::Status, timeout)?.0 {
        Response::Status(status) => Ok(*status),
        other => Err(refusal(files, other)),
    }
}

/// Returns the specification of a region, whether it is served or not.
///
/// # Errors
/// [`RegionError`].
pub fn record(files: &Files) -> Result<RegionSpec, RegionError> {
    files.read()
}

/// The party that changes the limit of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// The operator. The host's agent no longer chooses the limit.
    Operator,
    /// The host's agent, which the operator lets choose the limit.
    Agent,
}

/// Changes the limit of a region's local cache, and waits until the cache is within it.
///
/// # Errors
/// [`RegionError`]: pages that must leave have no place at lenders, or the agent asks and must not.
pub fn resize_cache(files: &Files, cache: Bytes, by: By) -> Result<(), RegionError> {
    let auto = (by == By::Operator).then_some(false);
    done(files, &Request::ResizeCache { cache, auto })
}

/// Lets the host's agent choose the limit of a region's local cache from now on.
///
/// # Errors
/// [`RegionError`].
pub fn adapt_cache(files: &Files) -> Result<(), RegionError> {
    let RegionSpec { cache, leases, began_local, .. } = files.read()?;
    if leases.is_empty() && !began_local {
        let why = "the region has no lenders: its pages stay in RAM of this host";
        return Err(RegionError::Misuse(why.to_owned()));
    }
    done(files, &Request::ResizeCache { cache, auto: Some(true) })
}

/// Returns the limits that the caches of the regions in `directory` share.
///
/// # Errors
/// [`RegionError`].
pub fn limits(directory: &Path) -> Result<Limits, RegionError> {
    Book::of(directory).with(|limits| limits.clone())
}

/// Sets the limit of the caches of all regions in `directory`, or of a group; `None` removes it.
/// Waits until all caches are within it.
///
/// # Errors
/// [`RegionError`], which names each region whose cache is not within the limit. The others are.
/// Repeat the call once those regions can follow it.
pub fn limit(
    directory: &Path,
    group: Option<&Group>,
    limit: Option<Bytes>,
) -> Result<Limits, RegionError> {
    let book = Book::of(directory);
    let mut specs = Vec::new();
    for files in list(directory)? {
        specs.push(files.read()?);
    }
    specs.retain(|spec| group.is_none_or(|group| spec.group == *group));
    let wanted = book.with(|limits| limits.change(group, limit, &specs))?;
    let Some(wanted) = wanted else {
        let why =
            format!("the limit is too small: {} regions need at least 256KiB each", specs.len());
        return Err(RegionError::Misuse(why));
    };
    let mut failed = Vec::new();
    for (name, most) in wanted {
        match done(&Files::new(directory, &name), &Request::Quota { most }) {
            Ok(()) => {}
            Err(RegionError::Refused(why)) => failed.push(format!("region '{name}': {why}")),
            Err(error) => failed.push(error.to_string()),
        }
    }
    if failed.is_empty() { limits(directory) } else { Err(RegionError::Refused(failed.join("; "))) }
}

/// Takes a part of another region's quota, which then is at most `most`. For engines, so its
/// timeout is short.
pub(super) fn take_quota(files: &Files, most: Bytes) -> Result<(), RegionError> {
    match asked(files, &Request::Quota { most }, NEIGHBOUR_TIMEOUT)? {
        (Response::Done, _) => Ok(()),
        (other, _) => Err(refusal(files, other)),
    }
}

/// Writes a region's cache to its lenders.
///
/// # Errors
/// [`RegionError`].
pub fn persist(files: &Files) -> Result<(), RegionError> {
    done(files, &Request::Persist)
}

/// Shares pages of a region with others of its group, if they are equal to the proposals. One call
/// should carry a few hundred.
///
/// # Errors
/// [`RegionError`].
pub fn share(files: &Files, proposals: Vec<Proposal>) -> Result<Merged, RegionError> {
    match ask(files, &Request::Share { proposals })? {
        Response::Merged(merged) => Ok(merged),
        other => Err(refusal(files, other)),
    }
}

/// Unshares all pages of a region.
///
/// # Errors
/// [`RegionError`].
pub fn unshare(files: &Files) -> Result<(), RegionError> {
    done(files, &Request::Unshare)
}

/// Makes pages of a region read as zeroes.
///
/// # Errors
/// [`RegionError`].
pub fn drop_pages(files: &Files, pages: Run) -> Result<(), RegionError> {
    done(files, &Request::Drop { pages })
}

/// Returns the run of all pages of a region.
///
/// # Errors
/// [`RegionError`].
pub fn all_pages(files: &Files) -> Result<Run, RegionError> {
    Ok(Run { first: 0, count: files.read()?.size.pages() })
}

/// Returns the states of pages, one by one, without a request to the engine.
///
/// # Errors
/// [`RegionError`].
pub fn states(files: &Files, pages: Run) -> Result<Vec<PageState>, RegionError> {
    pages::states(files, pages)
}

/// Returns the states of pages as runs, without a request to the engine.
///
/// # Errors
/// [`RegionError`].
pub fn pages(files: &Files, of: Run) -> Result<Vec<Pages>, RegionError> {
    Ok(Pages::runs(of.first, pages::states(files, of)?))
}

/// Returns the places of a region's extents, without a request to the engine.
///
/// # Errors
/// [`RegionError`].
pub fn extents(files: &Files) -> Result<Vec<Extent>, RegionError> {
    pages::extents(files)
}

/// Removes a region that no program has mapped, with its content. If its processes were killed, it
/// removes only its files here. Lenders keep its pages then until their leases end.
///
/// # Errors
/// [`RegionError`].
pub fn remove(files: &Files) -> Result<(), RegionError> {
    match served(files, &Request::Remove) {
        // An engine that cannot continue is started again and again, and has the region for a
        // moment each time.
        Err(RegionError::Unserved { .. }) if is_ever_free(files) => {
            let frames = files.group(&files.read()?.group).frames();
            let programs = waiting_programs(&files.mapped(), [files.region(), frames])
                .map_err(RegionError::io("cannot find the programs that map the region"))?;
            if !programs.is_empty() {
                let programs = programs.join(", ");
                return Err(RegionError::InUse { name: files.name().clone(), programs });
            }
        }
        removed => removed?,
    }
    // The engine has answered and is about to end; until then it has the files mapped.
    let group = files.read().map(|spec| spec.group);
    files.remove();
    if let Ok(group) = group {
        remove_if_last(files.directory(), &group);
    }
    regions::release_soon(files.directory());
    Ok(())
}

/// Removes the group's shared files with its last region.
fn remove_if_last(directory: &Path, group: &Group) {
    let is_member = |files: &Files| files.read().is_ok_and(|spec| spec.group == *group);
    if list(directory).is_ok_and(|all| !all.iter().any(is_member)) {
        let files = GroupFiles::new(directory, group);
        // An error means that nothing was shared. A cache of the group's disks stays.
        let _ = std::fs::remove_file(files.frames());
        let _ = std::fs::remove_file(files.giving());
        let _ = std::fs::remove_file(files.cpu_billing());
        let _ = std::fs::remove_dir(files.directory());
    }
}

/// Begins to hand a region over. The returned connection carries frames to its engine. If it closes
/// before the region is given away, the region stays.
///
/// # Errors
/// [`RegionError`].
pub fn send(files: &Files) -> Result<UnixStream, RegionError> {
    stream(files, &Request::Send)
}

/// Begins to take in a region that is another host's. The returned connection carries frames to its
/// engine.
///
/// # Errors
/// [`RegionError`].
pub fn receive(files: &Files) -> Result<UnixStream, RegionError> {
    stream(files, &Request::Receive)
}

/// Makes a region this host's, after a hand-over to it or an aborted one from it.
///
/// # Errors
/// [`RegionError`].
pub fn own(files: &Files) -> Result<(), RegionError> {
    served(files, &Request::Own)
}

/// Returns whether at some moment within [`RESTART`] no engine has the region.
fn is_ever_free(files: &Files) -> bool {
    let deadline = Instant::now() + RESTART;
    while files.is_served() {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(50));
    }
    true
}

/// Does the same as [`done`], and waits for the next engine if one has died.
fn served(files: &Files, request: &Request) -> Result<(), RegionError> {
    despite_deaths(|_| done(files, request))
}

/// Repeats a request while no engine serves, as the next one may serve soon. `ask` clears its
/// argument, the time of the first failure, at each sign of life.
fn despite_deaths<T>(
    mut ask: impl FnMut(&mut Option<Instant>) -> Result<T, RegionError>,
) -> Result<T, RegionError> {
    let mut dead = None;
    loop {
        match ask(&mut dead) {
            Err(error)
                if is_death(&error)
                    && dead.get_or_insert_with(Instant::now).elapsed() < RESTART =>
            {
                thread::sleep(Duration::from_millis(50));
            }
            answered => return answered,
        }
    }
}

/// Returns whether an engine has died, or not begun to serve. One that is silent lives.
fn is_death(error: &RegionError) -> bool {
    use io::ErrorKind::{TimedOut, WouldBlock};
    match error {
        RegionError::Unserved { .. } => true,
        RegionError::Io { source, .. } => !matches!(source.kind(), TimedOut | WouldBlock),
        _ => false,
    }
}

/// Returns the timeout of a request.
fn io_timeout(request: &Request) -> Duration {
    match request {
        Request::Status | Request::Send | Request::Receive | Request::Own => ANSWERING,
        // This request moves pages. The remaining ones may move all pages, or wait for a lender.
        Request::Share { .. } => 4 * ANSWERING,
        _ => WORKING,
    }
}

fn stream(files: &Files, request: &Request) -> Result<UnixStream, RegionError> {
    match asked(files, request, io_timeout(request))? {
        (Response::Done, stream) => Ok(stream),
        (other, _) => Err(refusal(files, other)),
    }
}

fn done(files: &Files, request: &Request) -> Result<(), RegionError> {
    match ask(files, request)? {
        Response::Done => Ok(()),
        other => Err(refusal(files, other)),
    }
}

fn refusal(files: &Files, response: Response) -> RegionError {
    match response {
        Response::Failed { error } => RegionError::Refused(error),
        Response::InUse { programs } => RegionError::InUse { name: files.name().clone(), programs },
        other => RegionError::Refused(format!("the engine sent an unexpected answer: {other:?}")),
    }
}

fn ask(files: &Files, request: &Request) -> Result<Response, RegionError> {
    asked(files, request, io_timeout(request)).map(|(response, _)| response)
}

/// Sends a request. Returns the answer, and the connection, which holds no unread data.
fn asked(
    files: &Files,
    request: &Request,
    io_timeout: Duration,
) -> Result<(Response, UnixStream), RegionError> {
    let failed = |error| unanswered(files, error, io_timeout);
    let mut answers = Answers::to(&files.control(), request, io_timeout).map_err(failed)?;
    let answer = answers.receive().map_err(failed)?;
    Ok((answer, answers.into_stream().map_err(failed)?))
}

/// Returns the error for a request that an engine did not answer.
fn unanswered(files: &Files, error: CallError, io_timeout: Duration) -> RegionError {
    match error {
        CallError::Absent(_, error)
            if error.kind() == io::ErrorKind::NotFound && !files.record().exists() =>
        {
            RegionError::Unknown(files.name().clone())
        }
        CallError::Absent(..) => {
            RegionError::Unserved { name: files.name().clone(), log: files.log() }
        }
        CallError::Unreachable(socket, error) => {
            RegionError::io(format!("cannot connect to {}", socket.display()))(error)
        }
        CallError::Unread(_, error) | CallError::Silent(_, error) => {
            let name = files.name();
            RegionError::io(format!(
                "the engine of region '{name}' did not answer within {io_timeout:?}"
            ))(error)
        }
    }
}
