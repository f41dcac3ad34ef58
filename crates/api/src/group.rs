//! The groups of a host.

use aquifer_page::Group as Name;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::schema;

/// A group that a host knows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Group {
    /// The group's name.
    #[schema(value_type = schema::Name)]
    pub name: Name,
    /// An id of the group's key, equal on two hosts if they have the same key.
    pub key_id: String,
    /// The agreement of the group's members, as in its file, without the key.
    #[schema(value_type = Object)]
    pub terms: serde_json::Value,
    /// The group's state in the last period, as `aquifer serve reprovision --json` prints it.
    /// Absent if the agent does not balance groups, or the group has no member here.
    #[schema(value_type = Option<Object>)]
    pub balanced: Option<serde_json::Value>,
}
