//! The agent's API over HTTP: for peers with mutual TLS, for the command line on a unix socket.
//!
//! Handlers turn a request into a [`Command`](crate::driver::Command) for the driver, and its
//! answer into JSON. Handlers decide nothing.

mod orders;
mod peers;
mod people;
mod serve;

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use aquifer_api::{Problem, path};
use aquifer_page::HostName;
use axum::body::to_bytes;
use axum::extract::{FromRef, FromRequest, FromRequestParts, Request, rejection::JsonRejection};
use axum::http::{StatusCode, header::CONNECTION, request::Parts};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, routing};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::time::timeout;
use utoipa::openapi::{self, Content, Ref, RefOr, ResponseBuilder};
use utoipa::{IntoResponses, OpenApi};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use serve::TIMEOUT;
pub use serve::{Endpoints, bind};

use crate::access::{Access, Person, Role};
use crate::agreements::Passing;
use crate::cluster::{Admission, Certified, Leaving, Revoking};
use crate::driver::Handle;
use crate::groups::Groups;
use crate::peers::Peers;
use crate::vms::Vms;

/// The components that answer requests.
#[derive(Clone, Debug)]
pub struct Served {
    /// The driver, for memory lent and borrowed.
    pub handle: Handle,
    /// The other hosts.
    pub peers: Peers,
    /// The VMs that move.
    pub vms: Vms,
    /// The groups of this host.
    pub groups: Groups,
    /// The agreements that go to other hosts, and come from them.
    pub(crate) passing: Passing,
    /// The admission of hosts to the cluster.
    pub(crate) admission: Admission,
    /// The hosts that may not be in the cluster any more.
    pub(crate) revoking: Revoking,
    /// This host's way out of the cluster.
    pub(crate) leaving: Leaving,
}

impl FromRef<Served> for Leaving {
    fn from_ref(served: &Served) -> Self {
        served.leaving.clone()
    }
}

impl FromRef<Served> for Revoking {
    fn from_ref(served: &Served) -> Self {
        served.revoking.clone()
    }
}

impl FromRef<Served> for Admission {
    fn from_ref(served: &Served) -> Self {
        served.admission.clone()
    }
}

impl FromRef<Served> for Handle {
    fn from_ref(served: &Served) -> Self {
        served.handle.clone()
    }
}

impl FromRef<Served> for Peers {
    fn from_ref(served: &Served) -> Self {
        served.peers.clone()
    }
}

impl FromRef<Served> for Vms {
    fn from_ref(served: &Served) -> Self {
        served.vms.clone()
    }
}

impl FromRef<Served> for Passing {
    fn from_ref(served: &Served) -> Self {
        served.passing.clone()
    }
}

impl FromRef<Served> for Groups {
    fn from_ref(served: &Served) -> Self {
        served.groups.clone()
    }
}

/// The caller of a request, known from the connection and never from the request's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// A person on this host.
    Local(Person),
    /// The host that the client certificate names.
    Peer(HostName),
    /// A host whose certificate has ended or does not hold yet, and which may only renew it.
    Lapsed(HostName),
    /// A host without a certificate, which may only ask to join.
    Stranger,
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Aquifer agent",
        description = "Messages between the agents of a cluster (mutual TLS), \
                       and orders to the agent of a host (unix socket)."
    ),
    components(schemas(Problem))
)]
struct Document;

/// The answers of every endpoint besides success.
struct Refusals;

impl IntoResponses for Refusals {
    fn responses() -> BTreeMap<String, RefOr<openapi::Response>> {
        let problem = Content::new(Some(Ref::from_schema_name("Problem")));
        let refused = ResponseBuilder::new()
            .description(
                "The agent refuses the request or fails: 400, 415 or 422 for a malformed request, \
                 403 for a caller without permission, 404 for an unknown thing, 409 otherwise.",
            )
            .content("application/json", problem);
        BTreeMap::from([("4XX".to_owned(), refused.build().into())])
    }
}

/// Returns the router of all endpoints, with their descriptions.
fn described() -> OpenApiRouter<Served> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(peers::mem_bor_req))
        .routes(routes!(peers::mem_bor_ack))
        .routes(routes!(peers::mem_bor_rej))
        .routes(routes!(peers::mem_bor_fin))
        .routes(routes!(peers::mem_len_fin))
        .routes(routes!(peers::renew))
        .routes(routes!(peers::permit))
        .routes(routes!(peers::offer))
        .routes(routes!(peers::summary))
        .routes(routes!(peers::access))
        .routes(routes!(peers::arrive))
        .routes(routes!(peers::agreements))
        .routes(routes!(peers::agreement))
        .routes(routes!(peers::join))
        .routes(routes!(peers::certificate))
        .routes(routes!(peers::revocations, peers::revoke))
        .routes(routes!(peers::left))
        .routes(routes!(orders::status))
        .routes(routes!(orders::cluster))
        .routes(routes!(orders::groups))
        .routes(routes!(orders::known_groups))
        .routes(routes!(orders::find_group))
        .routes(routes!(orders::borrow))
        .routes(routes!(orders::borrow_for))
        .routes(routes!(orders::settle))
        .routes(routes!(orders::give_back))
        .routes(routes!(orders::rotate_keys))
        .routes(routes!(orders::drain, orders::draining))
        .routes(routes!(orders::claim))
        .routes(routes!(orders::migrate))
        .routes(routes!(orders::forget))
        .routes(routes!(orders::leave))
}

/// Returns the OpenAPI document: the answer to `GET /v1/openapi.json` and the file
/// `docs/reference/openapi.json`.
pub fn openapi() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        let mut text = described().to_openapi().to_pretty_json().unwrap_or_default();
        text.push('\n');
        text
    });
    &TEXT
}

fn router(served: Served) -> Router {
    let (router, _) = described().split_for_parts();
    router
        .route(
            path::OPENAPI,
            routing::get(async |_: FromHost| ([("content-type", "application/json")], openapi())),
        )
        .method_not_allowed_fallback(async |request: Request| {
            Failure::new(
                StatusCode::METHOD_NOT_ALLOWED,
                format!("{} does not support {}", request.uri().path(), request.method()),
            )
        })
        .fallback(async |request: Request| {
            Failure::new(
                StatusCode::NOT_FOUND,
                format!("there is no {} {}", request.method(), request.uri().path()),
            )
        })
        .with_state(served)
        .layer(middleware::from_fn(read_body))
}

/// Most bytes in the body of a request.
const LARGEST_BODY: usize = 2 << 20;

/// Reads a request's body before anything else. hyper closes a connection without a word after the
/// answer to a request with an unread body, and the caller's next request there would fail. A body
/// that does not come must not hold a connection for ever.
async fn read_body(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let (status, why) = match timeout(TIMEOUT, to_bytes(body, LARGEST_BODY)).await {
        Ok(Ok(body)) => return next.run(Request::from_parts(parts, body.into())).await,
        Ok(Err(error)) => (StatusCode::PAYLOAD_TOO_LARGE, error.to_string()),
        Err(_) => (StatusCode::REQUEST_TIMEOUT, "its body does not come".to_owned()),
    };
    let why = format!("bad request to {}: {why}", parts.uri.path());
    ([(CONNECTION, "close")], Failure::new(status, why)).into_response()
}

/// A refusal with its HTTP status.
#[derive(Debug)]
struct Failure(StatusCode, Problem);

impl Failure {
    fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self(status, Problem { error: error.into(), help: None })
    }
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self(StatusCode::CONFLICT, problem)
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.0, Json(self.1)).into_response()
    }
}

/// A JSON body; the refusal of a bad one is a [`Problem`] that names the error.
struct Body<T>(T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        let path = request.uri().path().to_owned();
        let bad =
            |status, why: String| Failure::new(status, format!("bad request to {path}: {why}"));
        // Parse an object first: serde would take an array for any struct.
        let Json(mut object): Json<Map<String, Value>> =
            Json::from_request(request, state).await.map_err(|rejection: JsonRejection| {
                bad(rejection.status(), rejection.body_text())
            })?;
        object.values_mut().for_each(make_whole);
        let body = serde_json::from_value(object.into());
        body.map(Self).map_err(|error| bad(StatusCode::UNPROCESSABLE_ENTITY, error.to_string()))
    }
}

/// Turns each 4096.0 into 4096: JSON has one type of numbers, serde has two.
fn make_whole(value: &mut Value) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(make_whole),
        Value::Object(values) => values.values_mut().for_each(make_whole),
        Value::Number(number) if number.is_f64() => {
            let whole = number.as_f64().filter(|number| number.fract() == 0.0);
            if let Some(whole) = whole.filter(|whole| (0.0..u64::MAX as f64).contains(whole)) {
                *value = Value::from(whole as u64);
            }
        }
        _ => {}
    }
}

/// The calling peer; the extractor refuses other callers.
struct FromPeer(HostName);

impl<S: Send + Sync> FromRequestParts<S> for FromPeer {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        match parts.extensions.get::<Caller>() {
            Some(Caller::Peer(host)) if is_revoked(parts, host) => Err(Failure::new(
                StatusCode::FORBIDDEN,
                format!("{host} may not be in the cluster any more"),
            )),
            Some(Caller::Peer(host)) => Ok(Self(host.clone())),
            Some(Caller::Lapsed(host)) => Err(Failure::new(
                StatusCode::FORBIDDEN,
                format!("the certificate of {host} has lapsed: it may only renew it"),
            )),
            _ => Err(Failure::new(
                StatusCode::FORBIDDEN,
                format!("only peers may call {}", parts.uri.path()),
            )),
        }
    }
}

/// Returns whether a host was revoked since it connected: its connection is about to end.
fn is_revoked(parts: &Parts, host: &HostName) -> bool {
    let certified = parts.extensions.get::<Certified>();
    let revoking = parts.extensions.get::<Revoking>();
    certified
        .zip(revoking)
        .is_none_or(|(certified, revoking)| revoking.is_revoked(host, &certified.validity))
}

/// A caller on this host with the role 'read'; the extractor refuses other callers.
struct Reader;

/// A caller on this host with the role 'operate'; the extractor refuses other callers.
struct Operator;

/// A caller on this host with the role 'admin'; the extractor refuses other callers.
struct Administrator;

impl<S: Send + Sync> FromRequestParts<S> for Reader {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        require(parts, Role::Read).map(|()| Self)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Operator {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        require(parts, Role::Operate).map(|()| Self)
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Administrator {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        require(parts, Role::Admin).map(|()| Self)
    }
}

/// Refuses a caller that is not on this host, or lacks the role.
fn require(parts: &Parts, role: Role) -> Result<(), Failure> {
    let access = parts.extensions.get::<Arc<Access>>();
    match (parts.extensions.get::<Caller>(), access) {
        (Some(Caller::Local(person)), Some(access)) => {
            let what = format!("{} {}", parts.method, parts.uri.path());
            let refused = |problem| Failure(StatusCode::FORBIDDEN, problem);
            access.require(person, role, &what).map_err(refused)
        }
        _ => Err(Failure::new(
            StatusCode::FORBIDDEN,
            format!("only this host may call {}, over its unix socket", parts.uri.path()),
        )),
    }
}

/// The certificate of the calling host, which may have lapsed; the extractor refuses other callers.
struct WithCertificate(Certified);

impl<S: Send + Sync> FromRequestParts<S> for WithCertificate {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        let certified = parts.extensions.get::<Certified>();
        certified.cloned().map(Self).ok_or_else(|| {
            Failure::new(StatusCode::FORBIDDEN, format!("only peers may call {}", parts.uri.path()))
        })
    }
}

/// A caller that is known; the extractor refuses strangers.
struct FromHost;

impl<S: Send + Sync> FromRequestParts<S> for FromHost {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        match parts.extensions.get::<Caller>() {
            Some(Caller::Local(_)) => require(parts, Role::Read).map(|()| Self),
            Some(Caller::Peer(_)) => Ok(Self),
            _ => Err(Failure::new(
                StatusCode::FORBIDDEN,
                format!("only hosts of the cluster may call {}", parts.uri.path()),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_names_every_path_and_is_the_one_in_docs() {
        let document = described().to_openapi();
        let paths: Vec<_> = document.paths.paths.keys().map(String::as_str).collect();
        for path in [
            path::MEM_BOR_REQ,
            path::MEM_BOR_ACK,
            path::MEM_BOR_REJ,
            path::MEM_BOR_FIN,
            path::MEM_LEN_FIN,
            path::RENEW,
            path::PERMIT,
            path::OFFER,
            path::SUMMARY,
            path::ACCESS,
            path::STATUS,
            path::CLUSTER,
            path::GROUPS,
            path::FIND_GROUP,
            path::KNOWN_GROUPS,
            path::AGREEMENTS,
            path::AGREEMENT,
            path::BORROW,
            path::REGION_BORROW,
            path::REGION_SETTLE,
            path::RETURN,
            path::ROTATE_KEYS,
            path::DRAIN,
            path::CLAIM,
            path::ARRIVE,
            path::MIGRATE,
            path::JOIN,
            path::CERTIFICATE,
            path::REVOCATIONS,
            path::FORGET,
            path::LEFT,
            path::LEAVE,
        ] {
            assert!(paths.contains(&path), "{path} is not described");
        }
        assert_eq!(paths.len(), 32, "a path is missing here: {paths:?}");
        let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let file = here.join("../../docs/reference/openapi.json");
        if std::env::var_os("UPDATE_OPENAPI").is_some() {
            std::fs::write(&file, openapi()).unwrap();
        }
        let kept = std::fs::read_to_string(&file).unwrap_or_default();
        assert!(
            kept == openapi(),
            "docs/reference/openapi.json is old: \
             UPDATE_OPENAPI=1 cargo test -p aquifer-agent --lib the_document"
        );
    }

    #[tokio::test]
    async fn a_body_is_an_object_with_whole_numbers_in_any_notation() {
        async fn heard(body: &'static str) -> Result<u64, StatusCode> {
            let request = Request::post(path::BORROW).header("content-type", "application/json");
            let request = request.body(axum::body::Body::from(body)).unwrap();
            let heard = Body::<aquifer_api::order::Borrow>::from_request(request, &()).await;
            heard.map(|Body(order)| order.bytes.0).map_err(|Failure(status, _)| status)
        }
        for body in
            ["{\"bytes\":4096}", "{\"bytes\":4096.0}", "{\"bytes\":4.096e3}", "{\"bytes\":\"4K\"}"]
        {
            assert_eq!(heard(body).await, Ok(4096), "{body}");
        }
        for body in
            ["[4096]", "[]", "4096", "{\"bytes\":0.5}", "{\"bytes\":-4096.0}", "{\"bytes\":1e300}"]
        {
            assert_eq!(heard(body).await, Err(StatusCode::UNPROCESSABLE_ENTITY), "{body}");
        }
        assert_eq!(heard("{").await, Err(StatusCode::BAD_REQUEST));
    }
}
