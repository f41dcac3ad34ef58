//! Requests that change the leases of a region.

use std::path::Path;
use std::time::Duration;

use aquifer_control_socket::Answers;
use aquifer_page::LeaseId;
use aquifer_volume::{LeaseTarget, Progress, SecondCopy};

use super::{despite_deaths, refusal, served, unanswered};
use crate::error::RegionError;
use crate::process::Files;
use crate::process::message::{Request, Response};

/// How long an engine may be silent while it moves extents. It exceeds the longest step, the move
/// of one extent.
const SILENCE: Duration = Duration::from_secs(120);

/// Adds a lease to a region. If the engine dies meanwhile, the next one gets the request again. A
/// lease that the region has is not added again. `identity` is the directory of the host's
/// certificate; a region that has one keeps that.
///
/// # Errors
/// [`RegionError`]: the lease cannot be used, or the region is being handed over.
pub fn add_lease(
    files: &Files,
    lease: LeaseTarget,
    identity: Option<&Path>,
) -> Result<(), RegionError> {
    let identity = identity.map(Path::to_owned);
    served(files, &Request::AddLease { lease: Box::new(lease), identity })
}

/// Begins a second copy of a lease, on another lease. If the engine dies meanwhile, the next one
/// gets the request again. A copy that the region has is not begun again. An engine of an earlier
/// version makes no copy that lags behind: each of its writes waits for both lenders.
///
/// # Errors
/// [`RegionError`]: the lease cannot be used, the first lease is unknown or has another copy, or
/// the region is being handed over.
pub fn add_copy(files: &Files, copy: SecondCopy) -> Result<(), RegionError> {
    let SecondCopy { of, lease, lags } = copy;
    served(files, &Request::AddCopy { of, lease: Box::new(lease), lags })
}

/// Keeps second copies of all pages of a region that leave this host, in files in this directory. A
/// region that keeps some keeps those.
///
/// # Errors
/// [`RegionError`]: the copies cannot be begun, or the region is being handed over.
pub fn keep_disk_copies(files: &Files, directory: &Path) -> Result<(), RegionError> {
    served(files, &Request::KeepDiskCopies { directory: directory.to_owned() })
}

/// Moves all extents off a lease and releases it, while programs run. If the engine dies meanwhile,
/// the next one gets the request again. A lease that the region does not have counts as moved. If
/// there is no other room, extents go to a spill file in the directory `spill`. A second copy on
/// that lease ends.
///
/// # Errors
/// [`RegionError`]: the lender fails, no other lease and no spill file has room, or the region is
/// being handed over. The region then still has the lease, and no page is lost.
pub fn evacuate(
    files: &Files,
    lease: LeaseId,
    spill: Option<&Path>,
    mut on_progress: impl FnMut(Progress),
) -> Result<(), RegionError> {
    let request = Request::Evacuate { lease, spill: spill.map(Path::to_owned) };
    let failed = |error| unanswered(files, error, SILENCE);
    despite_deaths(|dead| {
        let mut answers = Answers::to(&files.control(), &request, SILENCE).map_err(failed)?;
        loop {
            let answer = answers.receive().map_err(failed)?;
            *dead = None;
            match answer {
                Response::Evacuating(now) => on_progress(now),
                Response::Done => return Ok(()),
                other => return Err(refusal(files, other)),
            }
        }
    })
}
