//! Endpoints for the operator, on the unix socket. Doc comments of handlers are text of
//! `docs/reference/openapi.json`.

use aquifer_api::Done;
use aquifer_api::agreement::{Find, Found, Known};
use aquifer_api::cluster::ClusterHost;
use aquifer_api::group::Group;
use aquifer_api::order::{
    Awaited, Borrow, BorrowFor, Borrowed, Claim, Departed, Drain, Draining, Forget, Forgotten,
    Leave, Migrate, Provided, Return, Returned, RotateKeys, RotatesKeys, Settle,
};
use aquifer_api::status::Status;
use axum::Json;
use axum::extract::State;

use super::{Administrator, Body, Failure, Operator, Reader, Refusals};
use crate::agreements::Passing;
use crate::cluster::{Admission, Leaving, Revoking};
use crate::driver::{Command, Handle};
use crate::groups::Groups;
use crate::peers::Peers;
use crate::vms::Vms;

/// Returns the state of this host.
///
/// Needs the role 'read'.
#[utoipa::path(get, path = "/v1/status", tag = "orders",
    responses((status = 200, description = "The answer.", body = Status), Refusals))]
pub(super) async fn status(
    State(handle): State<Handle>,
    _: Reader,
) -> Result<Json<Status>, Failure> {
    Ok(Json(handle.ask(|reply| Command::Status { reply }).await?))
}

/// Returns all hosts of the cluster, each asked now. A host that does not answer is in the list,
/// too, with the reason.
///
/// Needs the role 'read'.
#[utoipa::path(get, path = "/v1/cluster", tag = "orders",
    responses((status = 200, description = "The answer.", body = Vec<ClusterHost>), Refusals))]
pub(super) async fn cluster(
    State(handle): State<Handle>,
    State(peers): State<Peers>,
    _: Reader,
) -> Result<Json<Vec<ClusterHost>>, Failure> {
    let own = handle.ask(|reply| Command::Summary { reply }).await?;
    Ok(Json(peers.cluster(own).await))
}

/// Returns the groups of this host, their agreements and their sharing.
///
/// Needs the role 'read'.
#[utoipa::path(get, path = "/v1/groups", tag = "orders",
    responses((status = 200, description = "The answer.", body = Vec<Group>), Refusals))]
pub(super) async fn groups(
    State(groups): State<Groups>,
    _: Reader,
) -> Result<Json<Vec<Group>>, Failure> {
    Ok(Json(groups.all()?))
}

/// Returns what this host knows of all groups of the cluster, also of those that it has no
/// agreement of.
///
/// Needs the role 'read'.
#[utoipa::path(get, path = "/v1/groups/known", tag = "orders",
    responses((status = 200, description = "The answer.", body = Known), Refusals))]
pub(super) async fn known_groups(
    State(passing): State<Passing>,
    _: Reader,
) -> Result<Json<Known>, Failure> {
    Ok(Json(passing.known().await))
}

/// Looks for the agreement of a group here and, if told to wait, on other hosts for some seconds.
///
/// Needs the role 'read'.
#[utoipa::path(post, path = "/v1/groups/find", tag = "orders", request_body = Find,
    responses((status = 200, description = "The answer.", body = Found), Refusals))]
pub(super) async fn find_group(
    State(passing): State<Passing>,
    _: Reader,
    Body(order): Body<Find>,
) -> Result<Json<Found>, Failure> {
    Ok(Json(passing.find(&order).await?))
}

/// Borrows memory now. The answer comes when the kernel swaps to it.
///
/// Needs the role 'operate'.
#[utoipa::path(post, path = "/v1/borrow", tag = "orders", request_body = Borrow,
    responses((status = 200, description = "The answer.", body = Borrowed), Refusals))]
pub(super) async fn borrow(
    State(handle): State<Handle>,
    _: Operator,
    Body(order): Body<Borrow>,
) -> Result<Json<Borrowed>, Failure> {
    Ok(Json(handle.ask(|reply| Command::Borrow { order, reply }).await??))
}

/// Borrows memory for a region that is about to be made. The answer has all the leases.
///
/// Needs the role 'operate'.
#[utoipa::path(post, path = "/v1/regions/borrow", tag = "orders", request_body = BorrowFor,
    responses((status = 200, description = "The answer.", body = Provided), Refusals))]
pub(super) async fn borrow_for(
    State(handle): State<Handle>,
    _: Operator,
    Body(order): Body<BorrowFor>,
) -> Result<Json<Provided>, Failure> {
    Ok(Json(handle.ask(|reply| Command::BorrowFor { order, reply }).await??))
}

/// Says that a region exists with the leases borrowed for it, or will not.
///
/// Needs the role 'operate'.
#[utoipa::path(post, path = "/v1/regions/settle", tag = "orders", request_body = Settle,
    responses((status = 200, description = "The agent accepted it.", body = Done), Refusals))]
pub(super) async fn settle(
    State(handle): State<Handle>,
    _: Operator,
    Body(order): Body<Settle>,
) -> Result<Json<Done>, Failure> {
    handle.ask(|reply| Command::Settle { order, reply }).await??;
    Ok(Json(Done {}))
}

/// Gives borrowed memory back. The answer comes when it is done.
///
/// Needs the role 'operate'.
#[utoipa::path(post, path = "/v1/return", tag = "orders", request_body = Return,
    responses((status = 200, description = "The answer.", body = Returned), Refusals))]
pub(super) async fn give_back(
    State(handle): State<Handle>,
    _: Operator,
    Body(order): Body<Return>,
) -> Result<Json<Returned>, Failure> {
    Ok(Json(handle.ask(|reply| Command::Return { order, reply }).await??))
}

/// Replaces the keys of leases. The answer comes at once; `status` shows the age of each key.
///
/// Needs the role 'operate'.
#[utoipa::path(post, path = "/v1/keys/rotate", tag = "orders", request_body = RotateKeys,
    responses((status = 200, description = "The answer.", body = RotatesKeys), Refusals))]
pub(super) async fn rotate_keys(
    State(handle): State<Handle>,
    _: Operator,
    Body(order): Body<RotateKeys>,
) -> Result<Json<RotatesKeys>, Failure> {
    Ok(Json(handle.ask(|reply| Command::RotateKeys { order, reply }).await??))
}

/// Drains this host of leases and VMs, or ends that. The answer comes at once.
///
/// Needs the role 'operate'.
#[utoipa::path(post, path = "/v1/drain", tag = "orders", request_body = Drain,
    responses((status = 200, description = "The progress.", body = Draining), Refusals))]
pub(super) async fn drain(
    State(handle): State<Handle>,
    _: Operator,
    Body(order): Body<Drain>,
) -> Result<Json<Draining>, Failure> {
    Ok(Json(handle.ask(|reply| Command::Drain { order: Some(order), vms: true, reply }).await??))
}

/// Returns the progress of a drain.
///
/// Needs the role 'read'.
#[utoipa::path(get, path = "/v1/drain", tag = "orders",
    responses((status = 200, description = "The progress.", body = Draining), Refusals))]
pub(super) async fn draining(
    State(handle): State<Handle>,
    _: Reader,
) -> Result<Json<Draining>, Failure> {
    Ok(Json(handle.ask(|reply| Command::Drain { order: None, vms: true, reply }).await??))
}

/// Promises memory of this host to a VM or a region that is about to get it.
///
/// Needs the role 'operate'.
#[utoipa::path(post, path = "/v1/claim", tag = "orders", request_body = Claim,
    responses((status = 200, description = "The memory is promised.", body = Done), Refusals))]
pub(super) async fn claim(
    State(handle): State<Handle>,
    _: Operator,
    Body(order): Body<Claim>,
) -> Result<Json<Done>, Failure> {
    handle.ask(|reply| Command::Claim { order, reply }).await??;
    Ok(Json(Done {}))
}

/// Makes a peer wait for a VM of this host. The VM's supervisors on both hosts do the rest.
///
/// Needs the role 'operate'.
#[utoipa::path(post, path = "/v1/vms/migrate", tag = "orders", request_body = Migrate,
    responses((status = 200, description = "The answer.", body = Awaited), Refusals))]
pub(super) async fn migrate(
    State(vms): State<Vms>,
    _: Operator,
    Body(order): Body<Migrate>,
) -> Result<Json<Awaited>, Failure> {
    Ok(Json(vms.offer(order).await?))
}

/// Ends the certificates of a host, at all hosts. This host must be a signer.
///
/// Needs the role 'admin'.
#[utoipa::path(post, path = "/v1/forget", tag = "orders", request_body = Forget,
    responses((status = 200, description = "The answer.", body = Forgotten), Refusals))]
pub(super) async fn forget(
    State(revoking): State<Revoking>,
    State(admission): State<Admission>,
    _: Administrator,
    Body(order): Body<Forget>,
) -> Result<Json<Forgotten>, Failure> {
    Ok(Json(revoking.forget(admission, order).await?))
}

/// Leaves the cluster for good. The agent then ends.
///
/// Needs the role 'admin'.
#[utoipa::path(post, path = "/v1/leave", tag = "orders", request_body = Leave,
    responses((status = 200, description = "The answer.", body = Departed), Refusals))]
pub(super) async fn leave(
    State(leaving): State<Leaving>,
    _: Administrator,
    Body(order): Body<Leave>,
) -> Result<Json<Departed>, Failure> {
    Ok(Json(leaving.leave(order).await?))
}
