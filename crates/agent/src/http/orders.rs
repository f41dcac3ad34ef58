//! Endpoints for the operator, on the unix socket. Doc comments of handlers are text of
//! `docs/openapi.json`.

use aquifer_api::group::Group;
use aquifer_api::order::{Awaited, Borrow, Borrowed, Drain, Draining, Migrate, Return, Returned};
use aquifer_api::status::Status;
use axum::Json;
use axum::extract::State;

use super::{Body, Failure, FromLocal, Refusals};
use crate::driver::{Command, Handle};
use crate::groups::Groups;
use crate::vms::Vms;

/// Everything about this host.
#[utoipa::path(get, path = "/v1/status", tag = "orders",
    responses((status = 200, description = "The answer.", body = Status), Refusals))]
pub(super) async fn status(
    State(handle): State<Handle>,
    _: FromLocal,
) -> Result<Json<Status>, Failure> {
    Ok(Json(handle.ask(|reply| Command::Status { reply }).await?))
}

/// The groups of this host, what they agree on and what they share.
#[utoipa::path(get, path = "/v1/groups", tag = "orders",
    responses((status = 200, description = "The answer.", body = Vec<Group>), Refusals))]
pub(super) async fn groups(
    State(groups): State<Groups>,
    _: FromLocal,
) -> Result<Json<Vec<Group>>, Failure> {
    Ok(Json(groups.all()?))
}

/// Borrow now. Answered when the memory is swapped on.
#[utoipa::path(post, path = "/v1/borrow", tag = "orders", request_body = Borrow,
    responses((status = 200, description = "The answer.", body = Borrowed), Refusals))]
pub(super) async fn borrow(
    State(handle): State<Handle>,
    _: FromLocal,
    Body(order): Body<Borrow>,
) -> Result<Json<Borrowed>, Failure> {
    Ok(Json(handle.ask(|reply| Command::Borrow { order, reply }).await??))
}

/// Give back what was borrowed. Answered when it is done.
#[utoipa::path(post, path = "/v1/return", tag = "orders", request_body = Return,
    responses((status = 200, description = "The answer.", body = Returned), Refusals))]
pub(super) async fn give_back(
    State(handle): State<Handle>,
    _: FromLocal,
    Body(order): Body<Return>,
) -> Result<Json<Returned>, Failure> {
    Ok(Json(handle.ask(|reply| Command::Return { order, reply }).await??))
}

/// Take back all that was lent and lend nothing meanwhile, or lend again. Answered at once.
#[utoipa::path(post, path = "/v1/drain", tag = "orders", request_body = Drain,
    responses((status = 200, description = "How far it is.", body = Draining), Refusals))]
pub(super) async fn drain(
    State(handle): State<Handle>,
    _: FromLocal,
    Body(order): Body<Drain>,
) -> Result<Json<Draining>, Failure> {
    Ok(Json(handle.ask(|reply| Command::Drain { order: Some(order), reply }).await?))
}

/// How far a drain is.
#[utoipa::path(get, path = "/v1/drain", tag = "orders",
    responses((status = 200, description = "How far it is.", body = Draining), Refusals))]
pub(super) async fn draining(
    State(handle): State<Handle>,
    _: FromLocal,
) -> Result<Json<Draining>, Failure> {
    Ok(Json(handle.ask(|reply| Command::Drain { order: None, reply }).await?))
}

/// Have a peer wait for a VM of this host. What is left to do is between the VM's keepers on both.
#[utoipa::path(post, path = "/v1/vms/migrate", tag = "orders", request_body = Migrate,
    responses((status = 200, description = "The answer.", body = Awaited), Refusals))]
pub(super) async fn migrate(
    State(vms): State<Vms>,
    _: FromLocal,
    Body(order): Body<Migrate>,
) -> Result<Json<Awaited>, Failure> {
    Ok(Json(vms.offer(order).await?))
}
