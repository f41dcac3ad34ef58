//! The groups of a host.

use aquifer_page::Group as Name;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::schema;

/// A group that a host knows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Group {
    /// Its name.
    #[schema(value_type = schema::Name)]
    pub name: Name,
    /// By what to tell whether two hosts have the same key.
    pub key_id: String,
    /// What its members agree on, as in its file, but for the key.
    #[schema(value_type = Object)]
    pub terms: serde_json::Value,
    /// How it was in the last period, as `aquifer group balance --json` says it; none where the agent does not do that, or the group has no member here.
    #[schema(value_type = Option<Object>)]
    pub balanced: Option<serde_json::Value>,
}
