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
                let schema = schema.minimum(number.then_some(0_u64));
                let schema = schema.maximum(number.then_some(u64::MAX));
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
    /// A number of bytes. In requests also a text with a unit, as in `"512MiB"` or `"2G"`.
    Size,
    [Type::Integer, Type::String],
    "^[0-9]{1,6}([KMGTkmgt]([Ii]?[Bb])?|[Bb])?$"
);
schema!(
    /// An address at which a host listens: `192.0.2.1:7070`, `[2001:db8::1]:7070`.
    Socket,
    [Type::String],
    r"^(\[[0-9a-fA-F:.%]+\]|[0-9.]+):[0-9]{1,5}$"
);
