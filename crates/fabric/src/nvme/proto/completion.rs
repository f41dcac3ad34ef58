//! Completions: completion queue entries and their status.

use std::fmt;

use zerocopy::byteorder::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

layout!(
    /// A completion (Base, Figure 89 "Common Completion Queue Entry Layout"; on fabrics dwords 0 and 1 are one value,
    /// Figure 82).
    Completion, 16 {
        /// What the command returns besides its data.
        result: U64,
        /// How far the controller has got in the submission queue; meaningless without its flow control.
        queue_head: U16,
        /// Reserved on fabrics.
        queue_id: U16,
        /// The command's.
        command_id: U16,
        /// The status, above a bit that is 0 on fabrics.
        status: U16,
    }
);

impl Completion {
    /// The status.
    pub fn status(&self) -> Status {
        Status(self.status.get() >> 1)
    }
}

/// How a command ended (Base, Figure 92 "Status Field"): a code in the low byte, its type above, and flags.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Status(pub u16);

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal,)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Self = Self($code);)*

            /// Its name here, if it is a code that is used here.
            pub fn name(self) -> Option<&'static str> {
                match self.code() {
                    $($code => Some(stringify!($name)),)*
                    _ => None,
                }
            }
        }
    };
}

// Base, Figure 94 "Generic Command Status Values" (type 0), Figures 95 to 97 "Command Specific Status Values" (type 1),
// Figure 98 "Media and Data Integrity Error Values" (type 2).
codes! {
    /// Done.
    SUCCESS = 0x000,
    /// No such command.
    INVALID_OPCODE = 0x001,
    /// A field has a value that is not supported.
    INVALID_FIELD = 0x002,
    /// A command with this identifier is under way.
    COMMAND_ID_CONFLICT = 0x003,
    /// The controller failed.
    INTERNAL_ERROR = 0x006,
    /// An Abort command ended it.
    ABORT_REQUESTED = 0x007,
    /// The namespace does not exist, or must not be named.
    INVALID_NAMESPACE = 0x00B,
    /// The command must not come here.
    COMMAND_SEQUENCE = 0x00C,
    /// The data has another length than the command needs.
    DATA_LENGTH_INVALID = 0x00F,
    /// The data is described in a way that is not supported.
    SGL_TYPE_INVALID = 0x011,
    /// The data in the capsule starts at an offset that is not supported.
    SGL_OFFSET_INVALID = 0x016,
    /// The host's identifier has the wrong length.
    HOST_ID_FORMAT = 0x018,
    /// The keep alive time is too long or must not be zero.
    KEEP_ALIVE_INVALID = 0x01A,
    /// The data was damaged on its way: try again.
    TRANSIENT_TRANSPORT = 0x022,
    /// Blocks beyond the namespace's end.
    LBA_OUT_OF_RANGE = 0x080,
    /// No room for what is written.
    CAPACITY_EXCEEDED = 0x081,
    /// No such queue, or it exists already.
    INVALID_QUEUE = 0x101,
    /// There are as many asynchronous event requests as the controller takes.
    ASYNC_LIMIT = 0x105,
    /// No such log page.
    INVALID_LOG_PAGE = 0x109,
    /// The feature cannot be saved.
    FEATURE_NOT_SAVEABLE = 0x10D,
    /// The feature cannot be changed.
    FEATURE_NOT_CHANGEABLE = 0x10E,
    /// Connect: its format is not supported.
    CONNECT_FORMAT = 0x180,
    /// Connect: the controller has as many hosts as it takes.
    CONNECT_BUSY = 0x181,
    /// Connect: a parameter is wrong; the result says which.
    CONNECT_INVALID = 0x182,
    /// Connect: this host may not.
    CONNECT_INVALID_HOST = 0x184,
    /// The queue has not been authenticated.
    AUTHENTICATION_REQUIRED = 0x191,
    /// More at once than the controller takes (NVM, Figure 16).
    SIZE_LIMIT = 0x183,
    /// Ours, vendor specific: the namespace is another owner's.
    CLAIMED = 0x1C0,
    /// Ours, vendor specific: the namespace is not to be had now.
    NOT_NOW = 0x1C1,
    /// The blocks differ from the data.
    COMPARE_FAILURE = 0x285,
}

impl Status {
    /// Flag: to try again is no use.
    pub const DO_NOT_RETRY: u16 = 1 << 14;

    /// Type and code, without flags.
    pub fn code(self) -> u16 {
        self.0 & 0x7FF
    }

    /// Whether the command did what it should.
    pub fn is_success(self) -> bool {
        self.code() == 0
    }

    /// The same, with the advice not to try again.
    #[must_use]
    pub const fn final_(self) -> Self {
        Self(self.0 | Self::DO_NOT_RETRY)
    }

    /// The status as it is in a completion.
    pub fn to_field(self) -> U16 {
        (self.0 << 1).into()
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Status({:#05x} {})", self.0, self.name().unwrap_or("?"))
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => {
                write!(f, "{} ({:#05x})", name.to_ascii_lowercase().replace('_', " "), self.code())
            }
            None => write!(f, "status {:#05x}", self.code()),
        }
    }
}
