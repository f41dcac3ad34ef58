//! The people at the unix socket: no number of their connections keeps root or a peer out.

use std::collections::BTreeMap;
use std::sync::Arc;

use aquifer_api::Problem;
use axum::http::StatusCode;
use axum::{Extension, Router, middleware};
use tokio::net::UnixStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::serve::{Strangers, TIMEOUT, converse};
use super::{Caller, Failure, read_body};
use crate::access::{Access, Credentials};

/// Most connections of one user. Root and the agent's own user have no limit.
const OF_ONE_USER: usize = 32;

/// Most connections of all users together: a user may have many numbers (user_namespaces(7)).
const OF_ALL_USERS: usize = 256;

/// Most connections that only get a refusal.
const REFUSED: usize = 16;

/// The open connections of the unix socket.
#[derive(Debug)]
pub(super) struct People {
    access: Arc<Access>,
    router: Router,
    connections: JoinSet<()>,
    users: Users,
    refused: Strangers,
}

impl People {
    pub(super) fn new(access: Arc<Access>, router: Router) -> Self {
        let router = router.layer(Extension(access.clone()));
        let refused = Strangers::new(REFUSED);
        Self { access, router, connections: JoinSet::new(), users: Users::default(), refused }
    }

    /// Serves a person. One without a role, or with too many connections, only gets a refusal.
    pub(super) fn welcome(&mut self, stream: UnixStream, credentials: &Credentials) {
        let person = self.access.person(credentials);
        let (uid, has_role) = (person.uid, person.role.is_some());
        let caller = Caller::Local(person);
        let place = match has_role {
            true if self.access.may_all(uid) => Some(Place::default()),
            true => self.users.enter(uid),
            false => None,
        };
        if let Some(place) = place {
            let router = self.router.clone();
            self.connections.spawn(async move {
                converse(stream, router, caller).await;
                drop(place);
            });
            return;
        }
        // This router says which role the request needs.
        let router = if has_role { crowded(uid) } else { self.router.clone() };
        self.refused.add(async move {
            let _ = timeout(TIMEOUT, converse(stream, router, caller)).await;
            None
        });
    }

    /// Waits until a connection has ended; pending if none is open.
    pub(super) async fn ended(&mut self) {
        tokio::select! {
            Some(_) = self.connections.join_next() => {}
            _ = self.refused.next() => {}
        }
    }
}

/// Answers each request of a user with too many connections.
fn crowded(uid: u32) -> Router {
    let refuse = async move || {
        let error = format!("user {uid}, or all users together, have too many connections here");
        let help = Some("try again when some of them have ended".to_owned());
        Failure(StatusCode::TOO_MANY_REQUESTS, Problem { error, help })
    };
    Router::new().fallback(refuse).layer(middleware::from_fn(read_body))
}

/// What the connection of a user holds while it is open.
type Place = Arc<()>;

/// The places of each user; one more than connections are open.
#[derive(Debug, Default)]
struct Users(BTreeMap<u32, Place>);

impl Users {
    /// Returns a place for another connection of a user; `None` if there are too many.
    fn enter(&mut self, uid: u32) -> Option<Place> {
        self.0.retain(|_, place| Arc::strong_count(place) > 1);
        let open: usize = self.0.values().map(|place| Arc::strong_count(place) - 1).sum();
        let place = self.0.entry(uid).or_default();
        let is_free = open < OF_ALL_USERS && Arc::strong_count(place) <= OF_ONE_USER;
        is_free.then(|| place.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_so_many_connections_and_all_users_too() {
        let mut users = Users::default();
        let mut places: Vec<_> = (0..OF_ONE_USER).filter_map(|_| users.enter(1000)).collect();
        assert_eq!(places.len(), OF_ONE_USER);
        assert!(users.enter(1000).is_none());
        places.pop();
        places.extend(users.enter(1000));
        assert!(places.len() == OF_ONE_USER && users.enter(1000).is_none(), "one had ended");
        places.extend((2000..3000).filter_map(|uid| users.enter(uid)));
        assert_eq!(places.len(), OF_ALL_USERS);
        places.clear();
        let _place = users.enter(1001).unwrap();
        assert_eq!(users.0.len(), 1, "users without connections are forgotten");
    }
}
