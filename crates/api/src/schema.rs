//! The JSON forms of names, ids and sizes, for the API's description. The crate `page` has their
//! types and rules.

use std::borrow::Cow;

use utoipa::openapi::schema::{ObjectBuilder, SchemaType, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

macro_rules! schema {
    ($(#[doc = $doc:literal])* $name:ident, $types:expr, $pattern:expr) => {
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
    socket()
);

/// Returns the pattern of a socket address: IPv4, or IPv6 as RFC 4291 (section 2.2, forms 1 and 2)
/// writes it, in brackets.
fn socket() -> String {
    let octet = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])";
    let ipv4 = format!(r"{octet}(\.{octet}){{3}}");
    let group = "[0-9a-fA-F]{1,4}";
    // The two colons stand for all groups that are missing of the eight.
    let short = (1..7).map(|before| {
        let after = 7 - before;
        format!("({group}:){{1,{before}}}(:{group}){{1,{after}}}")
    });
    let ends = [
        format!("({group}:){{7}}{group}"),
        format!("({group}:){{1,7}}:"),
        format!("::({group}(:{group}){{0,6}})?"),
    ];
    let ipv6 = ends.into_iter().chain(short).collect::<Vec<_>>().join("|");
    let port = "(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5]?[0-9]{1,4})";
    format!(r"^({ipv4}|\[({ipv6})(%[0-9]{{1,9}})?\]):{port}$")
}
