//! Endpoints for other hosts: the five messages of \[Ge23\], renewals, offers, summaries, access to
//! leases, and arriving VMs. Doc comments of handlers are text of `docs/reference/openapi.json`.

use aquifer_api::agreement::{GivenAgreement, Known};
use aquifer_api::cluster::Summary;
use aquifer_api::message::{
    Access, Arrive, Awaits, Join, Joined, Leaving, MemBorAck, MemBorFin, MemBorRej, MemBorReq,
    MemLenFin, NextCertificate, Offer, Permit, Renew, Renewed, Revocations, SignedCertificate,
};
use aquifer_api::order::{Forget, Leave};
use aquifer_api::{Done, Threshold, schema};
use aquifer_control::Message;
use aquifer_page::LeaseId;
use axum::Json;
use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;

use super::{Body, Failure, FromPeer, Refusals, WithCertificate};
use crate::agreements::Passing;
use crate::cluster::{Admission, Revoking};
use crate::driver::{Command, Handle};
use crate::peers::Peers;
use crate::vms::Vms;

type Answer = Result<Json<Done>, Failure>;

async fn hear(handle: &Handle, FromPeer(from): FromPeer, message: Message) -> Answer {
    handle.ask(|reply| Command::Hear { from, message, reply }).await??;
    Ok(Json(Done {}))
}

/// A borrower asks for memory. The lender grants or refuses it in a separate message.
#[utoipa::path(post, path = "/v1/mem_bor_req", tag = "peers", request_body = MemBorReq,
    responses((status = 200, description = "The agent accepted it.", body = Done), Refusals))]
pub(super) async fn mem_bor_req(
    State(handle): State<Handle>,
    from: FromPeer,
    Body(MemBorReq { request, bytes, region, group, goes_first }): Body<MemBorReq>,
) -> Answer {
    let owner = region.into();
    hear(&handle, from, Message::MemBorReq { request, bytes, owner, group, goes_first }).await
}

/// A lender grants a request.
#[utoipa::path(post, path = "/v1/mem_bor_ack", tag = "peers", request_body = MemBorAck,
    responses((status = 200, description = "The agent accepted it.", body = Done), Refusals))]
pub(super) async fn mem_bor_ack(
    State(handle): State<Handle>,
    from: FromPeer,
    Body(MemBorAck { request, lease, bytes, uris, generation }): Body<MemBorAck>,
) -> Answer {
    let ack = Message::MemBorAck { request, lease, bytes, uris, generation };
    hear(&handle, from, ack).await
}

/// A lender refuses a request.
#[utoipa::path(post, path = "/v1/mem_bor_rej", tag = "peers", request_body = MemBorRej,
    responses((status = 200, description = "The agent accepted it.", body = Done), Refusals))]
pub(super) async fn mem_bor_rej(
    State(handle): State<Handle>,
    from: FromPeer,
    Body(MemBorRej { request, spare, reason }): Body<MemBorRej>,
) -> Answer {
    hear(&handle, from, Message::MemBorRej { request, spare, reason }).await
}

/// A borrower gives a lease back.
#[utoipa::path(post, path = "/v1/mem_bor_fin", tag = "peers", request_body = MemBorFin,
    responses((status = 200, description = "The agent accepted it.", body = Done), Refusals))]
pub(super) async fn mem_bor_fin(
    State(handle): State<Handle>,
    from: FromPeer,
    Body(MemBorFin { lease, generation }): Body<MemBorFin>,
) -> Answer {
    hear(&handle, from, Message::MemBorFin { lease, generation }).await
}

/// A lender wants a lease's memory back.
#[utoipa::path(post, path = "/v1/mem_len_fin", tag = "peers", request_body = MemLenFin,
    responses((status = 200, description = "The agent accepted it.", body = Leaving), Refusals))]
pub(super) async fn mem_len_fin(
    State(handle): State<Handle>,
    from: FromPeer,
    Body(MemLenFin { lease, generation }): Body<MemLenFin>,
) -> Result<Json<Leaving>, Failure> {
    let (FromPeer(from), message) = (from, Message::MemLenFin { lease, generation });
    let failed = handle.ask(|reply| Command::Hear { from, message, reply }).await??;
    Ok(Json(Leaving { failed }))
}

/// A borrower still needs these leases.
#[utoipa::path(post, path = "/v1/renew", tag = "peers", request_body = Renew,
    responses((status = 200, description = "The agent accepted it.", body = Renewed), Refusals))]
pub(super) async fn renew(
    State(handle): State<Handle>,
    FromPeer(from): FromPeer,
    Body(renew): Body<Renew>,
) -> Result<Json<Renewed>, Failure> {
    let lost = handle.ask(|reply| Command::Renew { from, renew, reply }).await?;
    Ok(Json(Renewed { lost }))
}

/// A borrower may move a region to another host, which needs this lease.
#[utoipa::path(post, path = "/v1/permit", tag = "peers", request_body = Permit,
    responses((status = 200, description = "The other host may use the lease.", body = Done),
        Refusals))]
pub(super) async fn permit(
    State(handle): State<Handle>,
    FromPeer(from): FromPeer,
    Body(permit): Body<Permit>,
) -> Answer {
    handle.ask(|reply| Command::Permit { from, permit, reply }).await??;
    Ok(Json(Done {}))
}

/// Returns the memory that this host would lend now.
#[utoipa::path(get, path = "/v1/offer", tag = "peers",
    params(("below" = Option<Threshold>, Query, description = "The limit of the room for VMs")),
    responses((status = 200, description = "The answer.", body = Offer), Refusals))]
pub(super) async fn offer(
    State(handle): State<Handle>,
    FromPeer(from): FromPeer,
    RawQuery(query): RawQuery,
) -> Result<Json<Offer>, Failure> {
    let below = threshold(query.as_deref().unwrap_or_default())?;
    Ok(Json(handle.ask(|reply| Command::Offer { from, below, reply }).await??))
}

/// Reads the threshold in a query. Other parameters are of newer agents.
fn threshold(query: &str) -> Result<Threshold, Failure> {
    let mut below = Threshold::Upper;
    for parameter in query.split('&') {
        below = match parameter.split_once('=').unwrap_or((parameter, "")) {
            ("below", "upper") => Threshold::Upper,
            ("below", "lower") => Threshold::Lower,
            ("below", _) => {
                let why = "the parameter 'below' is neither 'upper' nor 'lower'";
                return Err(Failure::new(StatusCode::BAD_REQUEST, why));
            }
            _ => below,
        };
    }
    Ok(below)
}

/// Returns what this host has, lends and borrows, for an operator of another host.
#[utoipa::path(get, path = "/v1/summary", tag = "peers",
    responses((status = 200, description = "The answer.", body = Summary), Refusals))]
pub(super) async fn summary(
    State(handle): State<Handle>,
    State(peers): State<Peers>,
    FromPeer(from): FromPeer,
) -> Result<Json<Summary>, Failure> {
    peers.admit(&from)?;
    Ok(Json(handle.ask(|reply| Command::Summary { reply }).await?))
}

/// Returns the data that a lease's borrower needs to use it over NVMe.
#[utoipa::path(get, path = "/v1/leases/{lease}/access", tag = "peers",
    params(("lease" = schema::Id, Path, description = "The lease")),
    responses((status = 200, description = "The answer.", body = Access), Refusals))]
pub(super) async fn access(
    State(handle): State<Handle>,
    FromPeer(from): FromPeer,
    Path(lease): Path<String>,
) -> Result<Json<Access>, Failure> {
    // A missing lease and another host's lease get the same answer.
    let none = || {
        Failure::new(
            StatusCode::NOT_FOUND,
            format!("{from} has no lease {lease} that this host serves over NVMe"),
        )
    };
    let id: LeaseId = lease.parse().map_err(|_| none())?;
    let asker = from.clone();
    let access = handle.ask(|reply| Command::Access { from: asker, lease: id, reply }).await?;
    access.map(Json).ok_or_else(none)
}

/// Announces a VM that another host moves here. The answer comes when this host waits for it.
#[utoipa::path(post, path = "/v1/vms/arrive", tag = "peers", request_body = Arrive,
    responses((status = 200, description = "The answer.", body = Awaits), Refusals))]
pub(super) async fn arrive(
    State(vms): State<Vms>,
    FromPeer(from): FromPeer,
    Body(arrive): Body<Arrive>,
) -> Result<Json<Awaits>, Failure> {
    Ok(Json(vms.receive(from, arrive).await?))
}

/// Returns what this host knows of the cluster's agreements, without their keys.
#[utoipa::path(get, path = "/v1/agreements", tag = "peers",
    responses((status = 200, description = "The answer.", body = Known), Refusals))]
pub(super) async fn agreements(
    State(passing): State<Passing>,
    FromPeer(from): FromPeer,
) -> Result<Json<Known>, Failure> {
    Ok(Json(passing.list(&from)?))
}

/// Returns the agreement of a group, with its key, to a host that may have it.
#[utoipa::path(get, path = "/v1/agreements/{group}", tag = "peers",
    params(("group" = schema::Name, Path, description = "The group")),
    responses((status = 200, description = "The answer.", body = GivenAgreement), Refusals))]
pub(super) async fn agreement(
    State(passing): State<Passing>,
    FromPeer(from): FromPeer,
    Path(group): Path<String>,
) -> Result<Json<GivenAgreement>, Failure> {
    let none = || Failure::new(StatusCode::NOT_FOUND, format!("this host has no group '{group}'"));
    let name = group.parse().map_err(|_| none())?;
    passing.give(&from, &name)?.map(Json).ok_or_else(none)
}

/// Admits a host to the cluster. The caller needs a token, and no certificate.
#[utoipa::path(post, path = "/v1/join", tag = "peers", request_body = Join,
    params(("renews" = Option<bool>, Query,
        description = "Whether the host renews its certificate; if not, it gets one of ten years")),
    responses((status = 200, description = "The host is admitted.", body = Joined), Refusals))]
pub(super) async fn join(
    State(admission): State<Admission>,
    RawQuery(query): RawQuery,
    Body(join): Body<Join>,
) -> Result<Json<Joined>, Failure> {
    let renews = renews(query.as_deref().unwrap_or_default())?;
    // It waits for the disk.
    let admitted = tokio::task::spawn_blocking(move || admission.admit(&join, renews)).await;
    let failed = |error| Failure::new(StatusCode::CONFLICT, format!("cannot admit hosts: {error}"));
    Ok(Json(admitted.map_err(failed)??))
}

/// Reads in a query whether a host renews its certificate. Other parameters are of newer hosts.
fn renews(query: &str) -> Result<bool, Failure> {
    let mut renews = false;
    for parameter in query.split('&') {
        renews = match parameter.split_once('=').unwrap_or((parameter, "")) {
            ("renews", "true") => true,
            ("renews", "false") => false,
            ("renews", _) => {
                let why = "the parameter 'renews' is neither 'true' nor 'false'";
                return Err(Failure::new(StatusCode::BAD_REQUEST, why));
            }
            _ => renews,
        };
    }
    Ok(renews)
}

/// Signs the next certificate of the calling host, whose present one may have ended.
#[utoipa::path(post, path = "/v1/certificate", tag = "peers", request_body = NextCertificate,
    responses((status = 200, description = "The certificate.", body = SignedCertificate),
        Refusals))]
pub(super) async fn certificate(
    State(admission): State<Admission>,
    WithCertificate(from): WithCertificate,
    Body(next): Body<NextCertificate>,
) -> Result<Json<SignedCertificate>, Failure> {
    admission.wait_to_renew().await;
    // It waits for the disk.
    let renewed = tokio::task::spawn_blocking(move || admission.renew(&from, &next.request)).await;
    let failed = |error| Failure::new(StatusCode::CONFLICT, format!("cannot sign: {error}"));
    Ok(Json(SignedCertificate { certificate: renewed.map_err(failed)?? }))
}

/// Returns what this host knows of hosts that may not be in the cluster any more.
#[utoipa::path(get, path = "/v1/revocations", tag = "peers",
    responses((status = 200, description = "The answer.", body = Revocations), Refusals))]
pub(super) async fn revocations(
    State(revoking): State<Revoking>,
    FromPeer(_): FromPeer,
) -> Result<Json<Revocations>, Failure> {
    Ok(Json(revoking.known()))
}

/// Takes in what the authority signed of hosts that may not be in the cluster any more.
#[utoipa::path(post, path = "/v1/revocations", tag = "peers", request_body = Revocations,
    responses((status = 200, description = "This host knows all of it.", body = Done), Refusals))]
pub(super) async fn revoke(
    State(revoking): State<Revoking>,
    FromPeer(_): FromPeer,
    Body(told): Body<Revocations>,
) -> Answer {
    revoking.take_in(told).await?;
    Ok(Json(Done {}))
}

/// A host leaves the cluster: its certificates end, and its name is free.
#[utoipa::path(post, path = "/v1/left", tag = "peers", request_body = Leave,
    responses((status = 200, description = "The agent accepted it.", body = Done), Refusals))]
pub(super) async fn left(
    State(revoking): State<Revoking>,
    State(admission): State<Admission>,
    FromPeer(from): FromPeer,
    Body(_): Body<Leave>,
) -> Answer {
    let order = Forget { host: from, force: false };
    revoking.forget(admission, order).await?;
    Ok(Json(Done {}))
}
