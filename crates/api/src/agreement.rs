//! What hosts of a cluster tell each other of the agreements of groups.

use std::fmt;
use std::path::PathBuf;

use aquifer_control::group::agreements::{Edition, KeyId};
use aquifer_page::{Group, HostName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Problem, schema};

/// What a host knows of all agreements of the cluster; it has no key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Known {
    /// One line for each key of a group.
    pub agreements: Vec<KnownAgreement>,
}

/// What a host knows of an agreement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KnownAgreement {
    /// The group.
    #[schema(value_type = schema::Name)]
    pub group: Group,
    /// The id of its key, 16 hexadecimal digits.
    #[schema(value_type = String)]
    pub key_id: KeyId,
    /// The latest version. Absent if an operator removed the agreement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub edition: Option<Edition>,
    /// The host where an operator made it so.
    #[schema(value_type = schema::Name)]
    pub by: HostName,
    /// The hosts that may have the agreement, `*` at the end for any text. If empty, all may.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// Whether the answering host has the agreement in this version.
    pub held: bool,
    /// Why an operator must choose between this agreement and another one of the same name. Only
    /// for an operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conflict: Option<Problem>,
}

/// An agreement with its key.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct GivenAgreement {
    /// The text of its file, in TOML. JSON would round numbers.
    pub agreement: String,
    /// Its version.
    pub edition: Edition,
    /// The host where an operator made this version.
    #[schema(value_type = schema::Name)]
    pub by: HostName,
}

impl fmt::Debug for GivenAgreement {
    /// Leaves out the agreement, which holds a key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GivenAgreement").field("edition", &self.edition).finish_non_exhaustive()
    }
}

/// The order to find a group's agreement now, here or on another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Find {
    /// The group.
    #[schema(value_type = schema::Name)]
    pub group: Group,
    /// Whether to ask other hosts, which may take some seconds.
    pub wait: bool,
}

/// The answer to [`Find`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Found {
    /// Whether this host has the agreement now.
    pub found: bool,
    /// The host where an operator made the agreement, if this host knows of one.
    #[schema(value_type = Option<schema::Name>)]
    pub known_by: Option<HostName>,
    /// The directory of this host's agreements.
    #[schema(value_type = String)]
    pub directory: PathBuf,
}
