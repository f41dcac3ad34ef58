//! What people may do at the agent's unix socket: the kernel names the caller's user and groups.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use aquifer_api::Problem;

use crate::config::AccessConfig;

/// What a person may do. Each role includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// Look at all.
    Read,
    /// Move memory: borrow, return, drain, migrate.
    Operate,
    /// Change the membership of the cluster.
    Admin,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Operate => "operate",
            Self::Admin => "admin",
        })
    }
}

/// The caller's user and groups, from the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The effective user.
    pub uid: u32,
    /// The effective group, and the supplementary ones.
    pub gids: Vec<u32>,
}

/// The groups of each role, by name and, in so far as this host knows them, by number.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// The user of the agent. It may do all, as root may.
    own: u32,
    /// The role that the members of a group have.
    roles: BTreeMap<u32, Role>,
    names: BTreeMap<Role, Vec<String>>,
}

/// A person at the unix socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Person {
    /// The user.
    pub uid: u32,
    /// What that user may do; `None` for nothing.
    pub role: Option<Role>,
}

impl Access {
    /// Takes the configured groups, which `number` looks up, and the user of the agent.
    pub fn new(config: &AccessConfig, own: u32, number: impl Fn(&str) -> Option<u32>) -> Self {
        let mut access = Self { own, ..Self::default() };
        for (role, groups) in [
            (Role::Read, &config.read),
            (Role::Operate, &config.operate),
            (Role::Admin, &config.admin),
        ] {
            access.names.insert(role, groups.clone());
            for group in groups {
                match number(group) {
                    // The roles come in order, so the highest holds.
                    Some(gid) => _ = access.roles.insert(gid, role),
                    None => tracing::warn!(
                        "[access] {role} names the group '{group}', which this host does not have"
                    ),
                }
            }
        }
        access
    }

    /// Returns whether a user may do all, whatever the groups are: root, and the agent's own user.
    pub fn may_all(&self, uid: u32) -> bool {
        uid == 0 || uid == self.own
    }

    /// Says what a caller may do: root and the agent's own user all, others what the best of their
    /// groups may.
    pub fn person(&self, Credentials { uid, gids }: &Credentials) -> Person {
        let best = gids.iter().filter_map(|gid| self.roles.get(gid)).max().copied();
        Person { uid: *uid, role: if self.may_all(*uid) { Some(Role::Admin) } else { best } }
    }

    /// Refuses a person that lacks a role.
    ///
    /// # Errors
    /// Names the role, the groups that have it, and the way out.
    pub fn require(&self, person: &Person, needed: Role, what: &str) -> Result<(), Problem> {
        if person.role >= Some(needed) {
            return Ok(());
        }
        let has = person.role.map_or_else(|| "no role".to_owned(), |role| format!("'{role}'"));
        let groups: BTreeSet<_> =
            self.names.range(needed..).flat_map(|(_, names)| names).map(String::as_str).collect();
        let help = match groups.is_empty() {
            true => format!(
                "run this as root, or name a group under [access] {needed} in the agent's \
                 configuration"
            ),
            false => format!(
                "run this as root, or become a member of the group {}: 'usermod -aG GROUP USER', \
                 and log in again",
                groups.into_iter().collect::<Vec<_>>().join(" or ")
            ),
        };
        Err(Problem {
            error: format!(
                "{what} needs the role '{needed}', and user {} has {has} here",
                person.uid
            ),
            help: Some(help),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access() -> Access {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let config = AccessConfig {
            read: names(&["staff", "nobody-has-it"]),
            operate: names(&["ops"]),
            admin: names(&["ops", "chiefs"]),
        };
        Access::new(&config, 500, |name| match name {
            "staff" => Some(100),
            "ops" => Some(200),
            "chiefs" => Some(300),
            _ => None,
        })
    }

    #[test]
    fn the_best_group_decides_and_root_may_all() {
        let role =
            |uid, gids: &[u32]| access().person(&Credentials { uid, gids: gids.to_vec() }).role;
        assert_eq!(role(0, &[]), Some(Role::Admin));
        assert_eq!(role(500, &[500]), Some(Role::Admin), "the agent runs as this user");
        assert_eq!(role(1000, &[1000]), None);
        assert_eq!(role(1000, &[1000, 100]), Some(Role::Read));
        assert_eq!(role(1000, &[100, 200]), Some(Role::Admin), "ops is named twice");
        assert_eq!(role(1000, &[0]), None, "the group of root is not root");
        let closed = Access::default();
        let person = closed.person(&Credentials { uid: 1000, gids: vec![100] });
        assert_eq!(person.role, None);
        closed.require(&person, Role::Read, "GET /v1/status").unwrap_err();
    }

    #[test]
    fn a_refusal_names_role_group_and_way_out() {
        let (access, person) = (access(), Person { uid: 1000, role: Some(Role::Read) });
        access.require(&person, Role::Read, "GET /v1/status").unwrap();
        let Problem { error, help } =
            access.require(&person, Role::Operate, "POST /v1/drain").unwrap_err();
        assert_eq!(error, "POST /v1/drain needs the role 'operate', and user 1000 has 'read' here");
        let help = help.unwrap();
        assert!(help.contains("the group chiefs or ops") && help.contains("root"), "{help}");
        let none = Access::default().require(&person, Role::Admin, "x").unwrap_err();
        assert!(none.help.unwrap().contains("[access] admin"));
    }
}
