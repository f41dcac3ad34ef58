//! The JSON forms of names, ids and sizes, for the API's description. The crate `page` has their
//! types and rules.

use std::borrow::Cow;

use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

macro_rules! schema {
    ($(#[doc = $doc:literal])* $name:ident, $types:expr, $pattern:literal) => {
        $(#[doc = $doc])*
        #[derive(Debug)]
        pub struct $name;

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                let types = SchemaType::from_iter($types);
                let text = [$($doc.trim()),*].join(" ");
                let schema = ObjectBuilder::new().schema_type(types).description(Some(text));
                let number = $types.contains(&Type::Integer);
                let schema = schema.minimum(number.then_some(0_u64)).maximum(number.then_some(u64::MAX));
                schema.pattern(Some($pattern)).build().into()
            }
        }

        impl ToSchema for $name {
            fn name() -> Cow<'static, str> {
                Cow::Borrowed(stringify!($name))
            }
        }
    };
}

schema!(
    /// The name of a host, a group, a region or a VM.
    Name,
    [Type::String],
    "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
);
schema!(
    /// 32 hexadecimal digits: the id of a lease, a volume, a request or a migration.
    Id,
    [Type::String],
    "^[0-9a-fA-F]{32}$"
);
schema!(
    /// A number of bytes; in requests also a text with a unit, as `"512MiB"` or `"2G"`.
    Size,
    [Type::Integer, Type::String],
    "^[0-9]{1,6}([KMGTkmgt]([Ii]?[Bb])?|[Bb])?$"
);
schema!(
    /// Where a host listens: `192.0.2.1:7070`, `[2001:db8::1]:7070`.
    Socket,
    [Type::String],
    r"^(\[[0-9a-fA-F:.%]+\]|[0-9.]+):[0-9]{1,5}$"
);

/// How a lease is that a host has granted.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "lowercase")]
pub enum LentState {
    /// It is being made.
    Opening,
    /// The borrower has not shown that it knows of it.
    Offered,
    /// The borrower has it.
    Held,
    /// The lender wants it back (`mem_len_fin`).
    #[schema(rename = "asked back")]
    AskedBack,
    /// Its memory is being freed.
    Freeing,
}

/// Why a host does not lend.
#[derive(Debug, ToSchema)]
#[schema(rename_all = "snake_case")]
pub enum Reason {
    /// It has less to spare.
    NoRoom,
    /// It is short of memory itself.
    Overloaded,
    /// It borrows.
    Borrowing,
    /// It asks others for memory.
    Asking,
    /// It asks leases back.
    Recalling,
    /// It lends nothing now: its operator wants all back.
    Draining,
    /// It has just started.
    Starting,
    /// The request was answered before.
    Settled,
    /// The request makes no sense.
    Invalid,
    /// It could not make the lease.
    Failed,
}
